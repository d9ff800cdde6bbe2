"""A scaling study as it is shown in the terminal and on a page."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from ...analyze.records.state_timeline import STATES
from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.outcomes.batch_advice import batch_advice
from ...analyze.scaling.outcomes.targets import SizeTarget, goal_of, targets
from ...analyze.scaling.study_model import STRONG, ScalingStudy, Setup
from ..document import (
    CODE,
    DOUBT,
    FAILED,
    LEAD,
    MUTED,
    PAGE,
    TERMINAL,
    Block,
    Bullets,
    Chart,
    Charts,
    Column,
    Document,
    Heading,
    Legend,
    Line,
    Part,
    Row,
    Section,
    Table,
    Text,
    graded,
)
from ..figure_names import named_figure
from ..numbers import amount, counted, duration, figure, size
from ..state_names import STATE_NAMES
from .findings import Findings
from .size_rows import FACTORS, SizeRow, size_rows
from .study_charts import measured_rows
from .study_sentences import (
    batch_sentences,
    failures,
    fit_sentence,
    prediction_sentence,
    target_sentences,
)

WIDE = 118  # columns of a terminal from which on all POP factors are shown
LEAST_SHOWN = 1e-5  # of an interval relative to its value
MAX_PLACES = 8  # nodes of a size that are named
SAME = {
    STRONG: "strong scaling: the same global batch",
    "weak": "weak scaling: the same batch per rank",
}
_ALL_FACTORS = (
    *(("parallel", "PE"), ("load_balance", "LB"), ("communication", "Comm"), ("input", "input")),
)
_FEW_FACTORS = (("parallel", "PE"),)
_LEGEND = {
    "PE": "parallel efficiency",
    "LB": "load balance",
    "Comm": "communication efficiency",
    "input": "no wait for input",
    "CS": "computation scalability",
}
_TERMS = {"PE": "parallel", "LB": "load_balance", "Comm": "communication", "input": "no input"}


def study_document(
    study: ScalingStudy, findings: Findings, width: int, running: Collection[Setup] = ()
) -> Document:
    """Return the tables of all kinds, with what was found.

    Args:
        width: Columns of the terminal.
        running: The setups that run now, which are marked.
    """
    factors = _ALL_FACTORS if width >= WIDE else _FEW_FACTORS
    kinds: list[Section] = []
    leads = []
    before = 0  # sizes of kinds before, in the JSON
    for kind in study.request.kinds:
        rows = size_rows(study, kind)
        if rows:
            found = findings.of_kind(kind)
            blocks = [*_sizes(rows, factors, before, running), *_sentences(study, kind, found)]
            heading = f"{SAME[kind][0].upper()}{SAME[kind][1:]}"
            kinds.append(Section(kind, f"{kind.capitalize()} scaling", blocks, heading))
        if measured := measured_rows(study, kind):
            leads.append(_lead(kind, measured))
        before += len(rows)
    summary: list[Block] = [Line(" ".join(leads), LEAD, PAGE)]
    summary += [Line(note, DOUBT, PAGE) for note in study.notes]
    end: list[Block] = []
    if any(run.figures for run in study.runs):
        end.append(Line(_legend(factors), MUTED))
    end += [Line(f"note: {note}", DOUBT, TERMINAL) for note in study.notes]
    end += [Line(f"Energy: {line}", MUTED, PAGE) for line in _energy_notes(study)]
    about: list[Text] = [Part(" ".join([study.request.script, *study.request.args]), CODE)]
    if study.batch is not None and study.batch.text:
        about.append(f"batch: {study.batch.text}")
    return Document(
        "Paceline: scaling study",
        f"Scaling of {study.name}",
        [
            Section("summary", "Summary", summary),
            *kinds,
            Section("legend", "", end),
            *_charts(study, leads),
            Section("factors", "Efficiencies", [_factor_table(study)], "POP efficiencies", PAGE),
            Section("fits", "Fits", list(_fits(findings)), "Fitted models", PAGE),
            Section("runs", "Runs", [_runs(study)], "Runs and placement", PAGE),
        ],
        about,
    )


def _lead(kind: str, rows: Sequence[SizeRow]) -> str:
    """Return the result of a kind in one sentence."""
    first, last = rows[0], rows[-1]
    if last is first or last.speedup is None or last.efficiency is None:
        only = counted(first.point.ranks, "rank")
        return f"{kind.capitalize()} scaling: only {only} could be measured."
    return (
        f"{kind.capitalize()} scaling: {counted(last.point.ranks, 'rank')} train "
        f"{last.speedup.value:.2f} times as many samples/s as "
        f"{counted(first.point.ranks, 'rank')}, an efficiency of {last.efficiency.value:.2f}."
    )


def _legend(factors: Sequence[tuple[str, str]]) -> str:
    names = [name for _, name in factors] + ["CS"]
    parts = ", ".join(f"{name}: {_LEGEND[name]}" for name in names)
    return f"±: half of the 90 % interval. {parts}"


def _sizes(
    rows: Sequence[SizeRow],
    factors: Sequence[tuple[str, str]],
    before: int,
    running: Collection[Setup],
) -> Iterator[Block]:
    """Yield the table of a kind, and why sizes have no figures."""
    has_energy = any(row.energy for row in rows)
    has_device = any(row.device_bytes for row in rows)
    columns = [
        Column("ranks", term="rank"),
        Column("nodes", term="node"),
        Column("batch"),
        Column("step", term="step time"),
        Column("samples/s", term="samples/s"),
        Column("speed-up", term="speed-up"),
        Column("eff.", term="scaling efficiency"),
        *(Column(name, term=_TERMS[name]) for _, name in factors),
        Column("CS", term="computation scalability"),
        Column("memory"),
        *[Column("device")] * has_device,
        *[Column("J/sample", term="energy")] * has_energy,
    ]
    cells = []
    for number, row in enumerate(rows, before):
        point, at = row.point, f"sizes.{number}"
        mark = "▸" if point.setup in running else ""
        head: list[Text] = [
            [mark, Part(str(point.ranks), figure=f"{at}.ranks")],
            Part(str(point.hosts), figure=f"{at}.nodes"),
            Part(f"{point.setup.global_batch:,}", figure=f"{at}.global_batch"),
        ]
        if row.throughput is None:
            rest: list[Text] = [Part("failed", FAILED) if point.failure else "-"]
            cells.append(Row([*head, *rest, *[""] * (len(columns) - 4)]))
            continue
        rest = [
            _interval(row.step, duration, f"{at}.step_s"),
            _range(row.throughput, amount, f"{at}.samples_per_s"),
            _range(row.speedup, "{:.2f}".format, f"{at}.speedup"),
            _graded_range(row.efficiency, f"{at}.scaling_efficiency"),
            *(graded(row.pop.get(name), f"{at}.pop.{name}") for name, _ in factors),
            graded(row.computation, f"{at}.computation_scalability"),
            size(row.memory_bytes) if row.memory_bytes else "-",
        ]
        if has_device:
            rest.append(size(row.device_bytes) if row.device_bytes else "-")
        if has_energy:
            rest.append(_energy(row))
        cells.append(Row([*head, *rest]))
    yield Table(columns, cells, is_dense=len(factors) == 1)
    for line in failures(rows):
        yield Line(line, FAILED)


def _energy(row: SizeRow) -> str:
    if row.energy is None:
        return "-"
    return f"{'~' if row.energy.is_estimate else ''}{figure(row.energy.joules)}"


def _interval(found: Estimate | None, show: Callable[[float], str], path: str) -> Text:
    """Return a value with half of its interval in percent, and on a page with its ends."""
    if found is None:
        return "-"
    half = found.precision
    shown = f" ±{100 * half:.2g} %" if LEAST_SHOWN < half < math.inf else ""
    return [*_range(found, show, path), Part(shown, where=TERMINAL)]


def _range(found: Estimate | None, show: Callable[[float], str], path: str) -> list[Part]:
    """Return a value, and on a page the ends of its interval."""
    if found is None:
        return [Part("-")]
    value = Part(show(found.value), figure=f"{path}.value")
    if not (found.low and math.isfinite(found.high) and found.precision > LEAST_SHOWN):
        return [value]
    ends = f" {show(found.low)} to {show(found.high)}"
    return [value, Part(ends, "range", where=PAGE)]


def _graded_range(found: Estimate | None, path: str) -> Text:
    if found is None:
        return "-"
    return [graded(found.value, f"{path}.value"), *_range(found, "{:.2f}".format, path)[1:]]


def _sentences(study: ScalingStudy, kind: str, findings: Findings) -> Iterator[Block]:
    lines = [one.text for one in findings.knees]
    lines += [f"{reason.text} {reason.remedy}".strip() for reason in findings.reasons]
    lines += [fit_sentence(one) for one in findings.fits]
    lines += [prediction_sentence(one) for one in findings.predictions]
    yield Bullets(lines)
    goal, found = goal_of(study), targets(study, kind)
    if goal is not None and found:
        yield Line("", where=TERMINAL)
        yield Heading(f"until {goal}")
        yield _targets(study, found)
        yield Bullets(target_sentences(found, goal))
    yield Bullets(batch_sentences(batch_advice(study, kind)))


def _targets(study: ScalingStudy, found: Sequence[SizeTarget]) -> Table:
    sizes = [row.point.setup for kind in study.request.kinds for row in size_rows(study, kind)]
    columns = [
        Column("ranks", term="rank"),
        Column("reached"),
        Column("samples"),
        Column("statistical eff.", term="statistical efficiency"),
        Column("time"),
        Column("node-hours"),
        Column("best"),
    ]
    rows = []
    for one in found:
        at = f"sizes.{sizes.index(one.point.setup)}.target"
        cells: list[Text] = [
            str(one.point.ranks),
            f"{one.reached} of {one.seeds}",
            _interval(one.samples, amount, f"{at}.samples"),
            _range(one.statistical_efficiency, "{:.2f}".format, f"{at}.statistical_efficiency"),
            _interval(one.seconds, duration, f"{at}.seconds"),
            _range(one.node_hours, figure, f"{at}.node_hours"),
            f"{one.best:.4g}" if one.best is not None else "-",
        ]
        rows.append(Row(cells))
    return Table(columns, rows)


def _charts(study: ScalingStudy, leads: Sequence[str]) -> list[Section]:
    """Return the sections with the charts of the page."""
    lead, goal = " ".join(leads), goal_of(study)
    curves = Charts(
        [
            (
                "",
                Chart(
                    "studySpeedup",
                    "Bars: 90 % confidence intervals. Dashed: the ideal speed-up. Dotted: fitted "
                    "models, with their bands.",
                    lead,
                ),
            ),
            (
                "",
                Chart(
                    "studyEfficiency",
                    "Speed-up over the ratio of the numbers of ranks. An efficiency of 0.8 or "
                    "above is good.",
                    lead,
                ),
            ),
        ]
    )
    losses = loss_charts(
        [kind for kind in study.request.kinds if measured_rows(study, kind)],
        " Strong scaling is ideal if bars halve with twice the ranks, weak scaling if they stay "
        "equal.",
    )
    until = "Samples to the target over samples/s; without start-up." if goal else ""
    costs = Charts(
        [
            ("", Chart("studyTime", until or "Without start-up.", "Time by number of ranks")),
            (
                "",
                Chart(
                    "studyCost",
                    "Nodes times hours. Nodes are counted whole.",
                    "Node-hours by number of ranks",
                ),
            ),
        ]
    )
    of_what = "to the target" if goal else "for a million samples"
    return [
        Section("curves", "Curves", [curves], "Speed-up and efficiency", PAGE),
        Section("losses", "Losses", losses, "Time per step, by state", PAGE),
        Section("costs", "Costs", [costs], f"Time and node-hours {of_what}", PAGE),
    ]


def loss_charts(kinds: Sequence[str], more: str = "") -> list[Block]:
    """Return the charts of the states of a step, by kind of scaling. more: for the caption."""
    caption = f"Mean of all ranks. The parts of a bar add up to the step time.{more}"
    charts = [
        (
            f"{kind.capitalize()} scaling",
            Chart(f"losses-{kind}", caption, f"Time per step by state, {kind} scaling"),
        )
        for kind in kinds
    ]
    return [Legend([(name, STATE_NAMES[name]) for name in STATES]), Charts(charts)]


def _factor_table(study: ScalingStudy) -> Table:
    """Return all POP efficiencies of all sizes."""
    rows = [row for kind in study.request.kinds for row in size_rows(study, kind)]
    values: dict[str, list[float | None]] = {
        "global_efficiency": [row.global_efficiency for row in rows],
        "computation_scalability": [row.computation for row in rows],
        **{f"pop.{name}": [row.pop[name] for row in rows] for name in FACTORS},
    }
    found = []
    for path, of_sizes in values.items():
        cells = [graded(one, f"sizes.{at}.{path}", 3) for at, one in enumerate(of_sizes)]
        found.append(Row([named_figure(path.removeprefix("pop.")), *cells]))
    headings = [f"{row.point.kind}, {counted(row.point.ranks, 'rank')}" for row in rows]
    return Table([Column("figure", right=False), *map(Column, headings)], found)


def _fits(findings: Findings) -> Iterator[Block]:
    """Yield the parameters of the fitted models."""
    if not findings.fits:
        yield Line("A fit needs at least two measured sizes.")
        return
    rows = [
        Row(
            [
                fit.kind,
                fit.model,
                Part(one.name, figure=f"fits.{at}.parameters.{number}.name"),
                f"{one.value:.4g}",
                f"{one.low:.3g} to {one.high:.3g}",
                one.unit,
                one.meaning,
            ]
        )
        for at, fit in enumerate(findings.fits)
        for number, one in enumerate(fit.parameters)
    ]
    names = ("scaling", "model", "parameter", "value", "95 % interval", "unit", "meaning")
    numbers = ("value", "95 % interval")
    yield Table([Column(name, right=name in numbers) for name in names], rows)


def _runs(study: ScalingStudy) -> Table:
    """Return the numbers of runs of all sizes, and their placement."""
    rows = []
    points = [row.point for kind in study.request.kinds for row in size_rows(study, kind)]
    for number, point in enumerate(points):
        at = f"sizes.{number}"
        places = [place for run in point.figures[:1] for place in run.placement]
        named = "; ".join(
            f"{place.host}: {place.ranks}" + (f", {place.cores}" if place.cores else "")
            for place in places[:MAX_PLACES]
        )
        if more := len(places) - MAX_PLACES:
            named += f" and {counted(more, 'node')} more" if more > 0 else ""
        cells: list[Text] = [
            Part(point.kind, figure=f"{at}.scaling"),
            str(point.ranks),
            Part(str(len(point.runs)), figure=f"{at}.runs"),
            Part(str(point.failed_runs), figure=f"{at}.failed_runs"),
            named,
        ]
        rows.append(Row(cells))
    columns = [Column("scaling", right=False), *map(Column, ("ranks", "runs", "failed"))]
    return Table([*columns, Column("node: ranks, cores", right=False)], rows)


def _energy_notes(study: ScalingStudy) -> list[str]:
    """Return how energy was read and charged, or why it could not be read; each text once."""
    found: dict[str, None] = {}
    for run in study.runs:
        if run.figures is not None:
            for reading in run.figures.energy:
                kind = "estimate" if reading.is_estimate else "measured"
                found[f"{reading.source} ({kind}): {reading.how}"] = None
            for note in run.figures.energy_notes:
                found[note] = None
    return list(found)
