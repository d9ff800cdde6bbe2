"""Report of one run, for terminal, page and JSON: where the time went, and how sure that is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..analyze.figures.report import Report
from ..analyze.figures.steps import StepTimes
from . import document as doc
from .exchange_tables import exchange_sections, exposed_blocks
from .figure_names import EFFICIENCIES, named_figure, shown_states, state_legend, state_name
from .losses import MIN_LISTED_LOSS, loss_items
from .numbers import amount, counted, duration, percent
from .roofline import draw_roofline
from .run_verdict import verdict_of_run
from .sentences import (
    core_wait_sentence,
    memory_warnings,
    noise_scale_sentence,
    outliers,
    peak_sentence,
    pipeline_sentences,
    reaches,
    troubles,
    work_sentences,
)

BAR_COLUMNS = 12
SPARKLINE_BLOCKS = "▁▂▃▄▅▆▇█"
MAX_DESCRIBED_STEPS = 6  # outliers, standstills and stalls with a sentence
MAX_PAIRS = 20  # of ranks, in the table of waits
MAX_ROOFLINE_COLUMNS = 110
BACKGROUND, MIN_BACKGROUND = "background", 0.0005  # beside the states; the share that is shown
MULTI_RANK_EFFICIENCIES = EFFICIENCIES[:5]
MEANING = {
    "useful": "computing for the model",
    "input": "waiting for a batch",
    "checkpoint": "waiting for a checkpoint",
    "validation": "evaluating",
    "starved": "waiting for a core",
    "other": "in no other state",
    "bubble": "waiting for other stages",
    "wait": "waiting for the last rank",
    "transfer": "after the last rank arrived",
    BACKGROUND: "collectives of other threads",
}


def run_document(
    report: Report,
    charts: Mapping[str, Any] | None = None,
    *,
    width: int = 100,
    is_full: bool = True,
) -> doc.Document:
    """Return the report of a run.

    Args:
        charts: Data of the page's charts (``page/run_page.py``); None for the terminal.
        width: Columns of the terminal. The meanings of the states are omitted if they do not fit.
        is_full: Include the tree of efficiencies, the tables of what is exchanged, and the largest
            losses with one sentence each.
    """
    hosts = len(set(report.hosts))
    on = f" on {hosts} nodes" if hosts > 1 else ""
    since = f" since step {report.first_step}" if report.first_step else ""
    ran = f"{counted(report.size, 'rank')}{on}, {counted(report.steps, 'step')}{since}"
    sections = [
        doc.Section("summary", "Summary", list(_summary(report, width))),
        *(_measured(report, charts or {}) if report.efficiencies is not None else []),
        doc.Section(
            "work",
            "FLOPs",
            list(_work(report, width)),
            doc.on_page("FLOPs and memory traffic of a step"),
        ),
        *_reliability(report),
        doc.Section("end", "", list(_end(report, is_full)), where=doc.TERMINAL),
    ]
    if not is_full:
        sections = [section for section in sections if section.id in ("summary", "end")]
    return doc.Document(
        [doc.on_page(f"Paceline: {report.name}"), doc.in_terminal(f"Paceline: {ran}")],
        f"Where the time of {counted(report.size, 'rank')} went",
        sections,
        [doc.command(report.command or [report.name])],
    )


def _summary(report: Report, width: int) -> Iterable[doc.Block]:
    yield doc.Conclusion(verdict_of_run(report))
    yield doc.BLANK
    measured = report.window_s
    started = f"wall time {report.wall_s:.1f} s (start-up {report.startup_s:.1f} s"
    started += f", measured {measured:.1f} s without the first step)" if measured else ")"
    rate = f"   {amount(report.samples_per_s)} samples/s" if report.samples_per_s else ""
    yield doc.Line([started, doc.Part(rate, doc.STRONG)], where=doc.TERMINAL)
    if report.states:
        yield _states_of_run(report, width)
    yield doc.Line(achieved(report), doc.LEAD, doc.PAGE)
    yield _facts(report)
    listed, rest = loss_items(report)
    if listed:
        yield doc.Heading("Largest losses and their causes", doc.PAGE)
        yield doc.Items(listed, doc.PAGE)
        more = f" Losses that are not listed: {percent(rest)}." if rest >= MIN_LISTED_LOSS else ""
        yield doc.Line(
            doc.text(f"[Shares|loss] are of all ranks' time.{more}"), doc.MUTED, doc.PAGE
        )
    elif measured:
        yield doc.Line("No loss reached 0.1 % of all ranks' time.", where=doc.PAGE)
    yield from doc.lines(memory_warnings(report), doc.DOUBT, doc.PAGE)
    yield from doc.lines([peak_sentence(report), _noise_scale(report)], where=doc.PAGE)
    yield from doc.lines(report.doubts, doc.DOUBT, doc.PAGE)


def _facts(report: Report) -> doc.Facts:
    rate, times, window = report.samples_per_s, report.step_times, report.window_s
    median = duration(times.median_s) if times else None
    measured = duration(window) if window else None
    return doc.Facts(
        [
            doc.Fact("samples/s", amount(rate) if rate else "", "samples_per_s", term="samples/s"),
            doc.Fact("steps", str(report.steps), "steps", term="steps"),
            doc.Fact("median step", median, "step_times.median_s", term="step time"),
            doc.Fact("wall time", duration(report.wall_s), "wall_s", term="wall time"),
            doc.Fact("start-up", duration(report.startup_s), "startup_s", term="start-up"),
            doc.Fact("measured", measured, "window_s", term="window"),
        ]
    )


def achieved(report: Report) -> str:
    """Return what the job did, in one or two sentences."""
    ranks = counted(report.size, "rank")
    hosts = len(set(report.hosts))
    on = f" on {hosts} nodes" if hosts > 1 else ""
    if report.window_s is None or report.efficiencies is None:
        return f"{ranks}{on} ran for {duration(report.wall_s)}: too few steps to measure."
    rate = f", {amount(report.samples_per_s)} samples/s" if report.samples_per_s else ""
    times = report.step_times
    step = f", {duration(times.median_s)} per step" if times is not None else ""
    useful = report.efficiencies.useful
    return (
        f"{ranks}{on} trained {counted(report.steps, 'step')} in "
        f"{duration(report.wall_s)}{rate}{step}. "
        f"{percent(useful)} of the ranks' time was useful (computing for the model), "
        f"{percent(1 - useful)} was lost."
    )


def _states_of_run(report: Report, width: int) -> doc.Table:
    """Return the table of the terminal: each state with its mean and its spread over the ranks."""
    count = len(report.ranks)
    is_explained = width >= 100 or (count < 3 and width >= 88)
    headings = ["minimum", "maximum"] if count > 4 else []
    if 1 < count <= 4:
        headings = [report.named([rank]) for rank in report.ranks]
    shown = [(name, [rank[name] for rank in report.states]) for name in shown_states(report.states)]
    if max(report.background, default=0.0) >= MIN_BACKGROUND:
        shown.append((BACKGROUND, report.background))
    rows = []
    for name, shares in shown:
        mean = sum(shares) / count
        cells = [percent(share) for share in shares] if headings else []
        if count > 4:
            cells = [
                f"{percent(share)} (rank {report.ranks[shares.index(share)]})"
                for share in (min(shares), max(shares))
            ]
        bar = "█" * round(mean * BAR_COLUMNS) or ("▏" if mean > 0 else "")
        drawn = [doc.Part(bar, f"state-{name}"), doc.Part(MEANING[name] * is_explained, doc.MUTED)]
        rows.append(doc.Row([state_name(report, name), percent(mean), *cells, *drawn]))
    columns = [*doc.columns("state"), *map(doc.Column, ("mean", *headings))]
    columns += [doc.Column("", right=False, width=BAR_COLUMNS), doc.Column("", right=False)]
    return doc.Table(columns, rows, doc.TERMINAL)


def _measured(report: Report, charts: Mapping[str, Any]) -> Iterable[doc.Section]:
    """Return the sections about a run that has measured steps."""
    heading = doc.on_page("Efficiencies")
    yield doc.Section("efficiencies", "Efficiencies", list(_efficiencies(report)), heading)
    of_ranks = doc.text("[States|state] of every rank")
    yield doc.Section("states", "Ranks", list(_states(report)), of_ranks, doc.PAGE)
    yield from _steps(report, charts)
    yield from _waits(report, charts)
    if report.pipeline:
        schedule = "Pipeline: the schedule as it ran"
        found = list(_pipeline(report, charts))
        yield doc.Section("pipeline", "Pipeline", found, schedule, doc.PAGE)
    yield from exchange_sections(report, is_page=bool(charts))
    listed, rest = loss_items(report)
    if listed:
        smaller = len(report.losses) - len(listed)
        lost = percent(sum(loss.share for loss in report.losses))
        end = [f"   {percent(rest)}: {counted(smaller, 'smaller loss', 'smaller losses')} (--json)"]
        assert report.efficiencies is not None
        whole = f"   {lost}: all losses; {percent(report.efficiencies.useful)} is useful"
        blocks: list[doc.Block] = [
            doc.Items(listed),
            *map(doc.Line, [*(end if smaller else []), whole]),
        ]
        largest = "The largest losses, of all ranks' time:"
        yield doc.Section("losses", "Losses", blocks, largest, doc.TERMINAL)
    if moments := charts.get("moments"):
        step = doc.text("Timeline of the typical, the best and the worst [step]")
        yield doc.Section("moments", "Timeline", list(_moments(report, moments)), step, doc.PAGE)


def has_efficiency(report: Report, field: str) -> bool:
    """Return whether a report shows a field of Efficiencies."""
    if report.size == 1 and field in MULTI_RANK_EFFICIENCIES:
        return False
    if field == "bubble":
        return "bubble" in shown_states(report.states)
    return getattr(report.efficiencies, field, None) is not None


def _efficiencies(report: Report) -> Iterable[doc.Block]:
    """Return the tree of efficiencies, in the form that HPC centres use for POP reports."""
    explained = (
        "The [useful share] is the product of these factors. 1 is ideal; 0.8 and above is good."
    )
    yield doc.Line(doc.text(explained), where=doc.PAGE)
    rows = []
    for field in EFFICIENCIES:
        if has_efficiency(report, field):
            value = getattr(report.efficiencies, field)
            is_good = value >= doc.GOOD_EFFICIENCY
            bar = doc.Part("", bar=[("", "useful" if is_good else "wait", value)])
            grade = [doc.graded(value, f"efficiencies.{field}")]
            grade += [] if is_good else [doc.on_page(" low", doc.LOW)]
            note = slowest(report) if field == "load_balance" and report.size > 1 else ""
            rows.append(doc.Row([named_figure(field), bar, grade, note]))
    columns = [
        doc.Column("efficiency (POP, multiplicative)", right=False, term="POP efficiencies"),
        doc.Column("", right=False, where=doc.PAGE),
        doc.Column("value"),
        doc.Column("", right=False),
    ]
    yield doc.Table(columns, rows, name="tree")
    shares = [part.efficiencies.useful for part in report.ranges]
    if len(shares) >= 3:
        most = len(SPARKLINE_BLOCKS)
        blocks = "".join(SPARKLINE_BLOCKS[min(int(s * most), most - 1)] for s in shares)
        first, last = report.ranges[0].first, report.ranges[-1].last
        spread = f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %, steps {first} to {last}"
        yield doc.BLANK
        yield doc.Line(
            ["useful over the steps  ", doc.Part(blocks, "state-useful"), f"  {spread}"],
            where=doc.TERMINAL,
        )


def slowest(report: Report) -> doc.Text:
    """Return which rank has most time outside communication."""
    if report.slowest_rank is None:
        return ""
    if report.slowest_real is False:
        return doc.Part("no rank is slower than the others by more than chance", doc.MUTED)
    excess = percent(report.slowest_excess or 0)
    return [
        doc.in_terminal("slowest", doc.MUTED),
        doc.on_page("slowest", term="slowest"),
        doc.Part(f": {report.named([report.slowest_rank])}, ", doc.MUTED),
        doc.Part(excess, doc.MUTED, "slowest_excess"),
        doc.Part(" more time outside communication than the mean", doc.MUTED),
    ]


def _states(report: Report) -> Iterable[doc.Block]:
    names = {name: state_name(report, name) for name in shown_states(report.states)}
    means = {name: sum(rank[name] for rank in report.states) / len(report.states) for name in names}
    yield state_legend(names, means)
    yield from doc.lines([core_wait_sentence(report)], doc.MUTED)
    if len(report.ranks) > 2:
        yield doc.Choice("sort", "Sort ranks by", [("rank", "number"), ("loss", "lost time")])
    useful = [rank["useful"] for rank in report.states]
    caption = f"Useful time is {percent(useful[0])} of the rank's time."
    if len(useful) > 1:
        least = (
            f"{percent(min(useful))} ({report.named([report.ranks[useful.index(min(useful))]])})"
        )
        caption = f"Useful time is {least} to {percent(max(useful))} of a rank's time."
    yield doc.Chart("states", caption, caption)
    yield doc.Folded("Show as a table", [states_of_ranks(report)])


def states_of_ranks(report: Report, path: str = "") -> doc.Table:
    """Return the shares of each rank's time by state. ``path``: of the report in the JSON."""
    names = shown_states(report.states)
    states = (f"{state_name(report, name)}|{name}" for name in names)
    columns = doc.columns("rank|rank", "node|node", *states, "hidden|hidden", left=2)
    beside = [("hidden", report.hidden)]
    if max(report.background, default=0.0) >= MIN_BACKGROUND:
        columns.append(doc.Column("background", term="background"))
        beside.append((BACKGROUND, report.background))
    rows = []
    for i, (rank, host) in enumerate(zip(report.ranks, report.hosts, strict=True)):
        cells: list[doc.Text] = [str(rank), host]
        for name in names:
            share = percent(report.states[i][name])
            cells.append(doc.Part(share, figure=f"{path}states.{i}.{name}"))
        cells += [doc.Part(percent(of[i]), figure=f"{path}{name}.{i}") for name, of in beside]
        rows.append(doc.Row(cells))
    return doc.Table(columns, rows)


def _steps(report: Report, charts: Mapping[str, Any]) -> Iterable[doc.Section]:
    """Return the distribution of step times, with the causes of the outliers."""
    times, causes = report.step_times, [*troubles(report), *outliers(report)]
    sentences = [f"{cause}." for cause in causes[:MAX_DESCRIBED_STEPS]]
    if more := causes[MAX_DESCRIBED_STEPS:]:
        sentences.append(f"{counted(len(more), 'more cause')}: see --json.")
    indent = doc.in_terminal("  ")
    bullets = doc.Bullets([[indent, text] for text in sentences])
    listed: list[doc.Block] = [bullets] if sentences else []
    if times is None:
        yield doc.Section("steps", "", listed, where=doc.TERMINAL)
        return
    text = _step_times(times)
    about: list[str | doc.Part] = [text, *doc.text(" ([percentile], [outlier])", doc.PAGE)]
    caption = []
    if len(times.outliers) < times.outlier_count:
        caption.append(f"Diamonds mark the {len(times.outliers)} longest outliers.")
    elif times.outliers:
        caption.append("Diamonds mark outliers.")
    if charts.get("steps", {}).get("together"):
        caption.append(
            "The line is the median of neighbouring steps. The band reaches from their minimum to "
            "their maximum."
        )
    blocks: list[doc.Block] = [
        doc.Line(about),
        *listed,
        doc.Chart("steps", " ".join(caption), text),
    ]
    heading = doc.text("[Step time|step time] over the run", doc.PAGE)
    yield doc.Section("steps", "Step times", blocks, heading)


def _step_times(times: StepTimes) -> str:
    steps = counted(times.last - times.first + 1, "step")
    percentiles = f"{duration(times.p5_s)} to {duration(times.p95_s)}"
    return (
        f"Median step time {duration(times.median_s)}, 5th to 95th percentile {percentiles}, "
        f"{counted(times.outlier_count, 'outlier')} in {steps}."
    )


def _waits(report: Report, charts: Mapping[str, Any]) -> Iterable[doc.Section]:
    """Return the page's sections about waits: rank by step, and who waited for whom."""
    if "waiting" in charts:
        together = charts["waiting"]["together"]
        wait = [rank["wait"] for rank in report.states]
        caption = (
            "The rank that waits least while the others wait is the straggler. Ranks wait for "
            f"{percent(min(wait))} to {percent(max(wait))} of their time."
            + (" Each cell combines neighbouring steps or ranks." if together else "")
        )
        options = [("mean", "mean"), ("worst", "maximum")]
        choice = [doc.Choice("map", "Each cell combines neighbours: show", options)]
        blocks: list[doc.Block] = [
            *(choice if together else []),
            doc.Chart("waiting", caption, caption),
        ]
        heading = doc.text("[Waiting|waiting map], rank by step")
        yield doc.Section("waiting", "Waiting", blocks, heading, doc.PAGE)
    if "pairs" in charts:
        heading = doc.text("[Stragglers|straggler]: who [waited for] whom")
        found = list(_stragglers(report, charts))
        yield doc.Section("whom", "Stragglers", found, heading, doc.PAGE)


def _stragglers(report: Report, charts: Mapping[str, Any]) -> Iterable[doc.Block]:
    if not report.waited_for:
        yield doc.Line("No rank waited for another rank.")
        return
    longer = "The cause of a wait is [the work that the late rank did longer|did longer]."
    yield doc.Line(doc.text(longer), doc.MUTED)
    late = (
        "Waits that each late rank caused, of all ranks' time, by the state in which it was longer."
    )
    names = charts["late"]["names"]
    worst = f"{names[0].capitalize()} caused the most waiting" if names else "No rank was late"
    pairs = "Share of its time that each rank waited for each other rank."
    if charts["pairs"]["together"]:
        pairs += " Each cell is the mean of neighbouring ranks."
    first = report.waited_for[0]
    waited = f"{report.named([first.rank])} waited for {report.named([first.waited_for])}"
    largest = f"Largest wait: {waited} during {percent(first.share)} of its time"
    yield doc.Charts([doc.Chart("late", late, worst), doc.Chart("pairs", pairs, largest)])
    rows = []
    for number, pair in enumerate(report.waited_for[:MAX_PAIRS]):
        at = f"waited_for.{number}"
        cells = [("rank", pair.rank), ("waited_for", pair.waited_for)]
        parts = [doc.Part(str(rank), figure=f"{at}.{name}") for name, rank in cells]
        rows.append(doc.Row([*parts, doc.Part(percent(pair.share), figure=f"{at}.share")]))
    columns = doc.columns("rank|rank", "waited for rank|waited for", "of its time", left=0)
    yield doc.Folded("Show the largest waits as a table", [doc.Table(columns, rows)])


def _pipeline(report: Report, charts: Mapping[str, Any]) -> Iterable[doc.Block]:
    yield from doc.lines(pipeline_sentences(report))
    if schedule := charts.get("schedule"):
        caption = (
            f"Micro-batches of step {schedule['step']}, as they ran: F forward, B "
            "backward, I backward of the activations, W backward of the parameters, ' second "
            "virtual stage. Stages wait where a row is empty."
        )
        if schedule["is_cut"]:
            caption += " Only the first ones of the step are shown."
        yield doc.Chart("schedule", caption, caption)
    bubble = "The [bubble] is the time in which stages wait for each other."
    yield doc.Line(doc.text(bubble), doc.MUTED)


def _moments(report: Report, moments: Sequence[Mapping[str, Any]]) -> Iterable[doc.Block]:
    yield state_legend({name: state_name(report, name) for name in shown_states(report.states)})
    for number, moment in enumerate(moments):
        kind, step, seconds = moment["kind"], moment["step"], duration(moment["seconds"])
        yield doc.Heading(f"{kind.capitalize()}: step {step}, {seconds}")
        caption = (
            "All ranks, from the first start of the step to its last end. Each of the "
            f"{moment['columns']} columns shows the state that takes most of its time."
        )
        label = f"{kind} step {step} of {counted(len(report.ranks), 'rank')}, {seconds}"
        yield doc.Chart(f"moment{number}", caption, label)


def _work(report: Report, width: int) -> Iterable[doc.Block]:
    """Return the FLOPs of a step, and the roofline if there is one."""
    sentences, line = work_sentences(report), report.roofline
    if not sentences:
        return
    yield from doc.lines(sentences)
    note = doc.text("[FLOPs] and [memory traffic|traffic] of one step")
    if line is None:
        note += doc.text(
            ". `paceline report --machine machine.toml` adds the roofline; `paceline check` "
            "measures it."
        )
    else:
        note += doc.text(", on the [roofline] of {host}.", host=doc.Part(line.host))
    yield doc.Line(note, doc.MUTED, doc.PAGE)
    if line is None:
        return
    columns = min(width, MAX_ROOFLINE_COLUMNS) - 4
    yield doc.Line(draw_roofline(line.roofs, line.points, columns), doc.FIXED, doc.TERMINAL)
    caption = (
        "Both axes are logarithmic. Memory bandwidth limits work below the slope; arithmetic "
        "limits work below the flat part."
    )
    yield doc.Chart("roofline", caption, ". ".join(sentences))
    if line.points:
        rows = []
        for name, point in line.points.items():
            intensity = doc.Part(
                f"{point.intensity:.3g}", figure=f"roofline.points.{name}.intensity"
            )
            rows.append(doc.Row([name, intensity, reaches(point)]))
        columns_of_points = [*doc.columns("", "FLOP/byte"), doc.Column("reaches", right=False)]
        yield doc.Table(columns_of_points, rows, doc.PAGE)


def _reliability(report: Report) -> list[doc.Section]:
    """Return the page's sections about nodes and about the reliability of the figures."""
    residual = duration(report.clock_residual_s) if report.clock_residual_s else "one clock"
    overwritten = f", of which {report.lost_events:,} overwritten" if report.lost_events else ""
    cost, events = f"{100 * report.recording_cost:.2g} %", f"{report.events:,}"
    confidence = f"{report.confidence:.2f}"
    missing = f"{len(report.missing_ranks)} of {report.size}"
    unmatched = str(report.unmatched)
    facts = doc.Facts(
        [
            doc.Fact("confidence", confidence, "confidence", term="confidence"),
            doc.Fact("recording cost", cost, "recording_cost", term="recording cost"),
            doc.Fact("clock residual", residual, "clock_residual_s", term="clock residual"),
            doc.Fact("ranks without record", missing, term="missing"),
            doc.Fact("unmatched collectives", unmatched, "unmatched", term="unmatched"),
            doc.Fact("events", events, "events", term="events", after=overwritten),
        ]
    )
    well = doc.Line("All ranks have a record, and all collectives were matched.")
    doubts = doc.Bullets([f"{doubt}." for doubt in report.doubts])
    return [
        doc.nodes_section([doc.Nodes(report, "")]),
        doc.Section(
            "trust",
            "Reliability",
            [facts, doubts if report.doubts else well],
            "Reliability of these figures",
            doc.PAGE,
        ),
    ]


def _end(report: Report, is_full: bool) -> Iterable[doc.Block]:
    """Return the last lines in the terminal: what is short, and what the user is warned about."""
    if report.efficiencies is not None:
        if not is_full:
            yield from _short(report)
        yield from doc.lines([*pipeline_sentences(report), core_wait_sentence(report)])
        yield from _loading(report)
        cost = f"{100 * report.recording_cost:.2g} % of the time after start-up (measured)"
        yield doc.Line(f"recording cost {cost}")
    yield from doc.lines([_noise_scale(report)])
    if is_full or (report.peaks and report.peaks[0].predicted is not None):
        yield from doc.lines([peak_sentence(report)])
    yield from doc.lines([*memory_warnings(report), *report.doubts], doc.DOUBT)
    if is_full and report.confidence < 0.995:
        yield doc.Line(f"confidence {report.confidence:.2f}", doc.DOUBT)


def _short(report: Report) -> Iterable[doc.Block]:
    """Return the main efficiencies in two lines, and what took longer than usual."""
    e = report.efficiencies
    assert e is not None
    if report.size > 1:
        factors: list[str | doc.Part] = [
            "parallel efficiency ",
            doc.graded(e.parallel),
            " = load balance ",
        ]
        factors += [doc.graded(e.load_balance), " x communication efficiency "]
        yield doc.Line([*factors, doc.graded(e.communication)])
        yield doc.Line(slowest(report))
    yield from doc.lines([*troubles(report), *exposed_blocks(report)])


def _noise_scale(report: Report) -> str:
    return noise_scale_sentence(report.noise_scale) if report.noise_scale is not None else ""


def _loading(report: Report) -> Iterable[doc.Block]:
    """Return the CPU use of the loader's workers, and the number of unreadable samples."""
    totals = report.loading
    if totals is None:
        return
    kind, plural = ("process", "es") if totals.processes else ("thread", "s")
    if totals.workers:
        whose, most = "the rank", ""
        if len(report.ranks) > 1:
            whose = "each rank"
            most = f" on average, at most {totals.most:.2f} (rank {totals.rank})"
        workers = counted(totals.workers, f"loader {kind}", f"loader {kind}{plural}")
        yield doc.Line(f"the {workers} of {whose} used {totals.cores:.2f} cores{most}")
    if totals.left_out:
        samples = counted(totals.left_out, "sample")
        yield doc.Line(f"{samples} could not be read and were skipped", doc.DOUBT)
