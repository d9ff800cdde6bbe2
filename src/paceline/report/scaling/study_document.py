"""A scaling study as it is shown in the terminal and on a page."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from ...analyze.reference.metric import Goal
from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.laws import Parameter
from ...analyze.scaling.outcomes.batch_advice import Band, BatchAdvice, batch_advice
from ...analyze.scaling.outcomes.targets import (
    NO_RULE,
    UNCHANGED,
    SizeTarget,
    cheapest,
    goal_of,
    learning_rate_rule,
    soonest,
    targets,
)
from ...analyze.scaling.study_model import STRONG, ScalingStudy, Setup
from .. import document as doc
from ..figure_names import EFFICIENCIES, STATE_NAMES, named_figure, state_legend
from ..numbers import amount, counted, duration, figure, percent, size
from ..verdict import capitalized
from .findings import CheckedPrediction, Findings, Fit
from .size_rows import SizeRow, size_rows
from .study_charts import measured_rows

WIDE = 118  # columns of a terminal from which on all POP factors are shown
LEAST_SHOWN = 1e-5  # of an interval relative to its value
MAX_PLACES = 8  # nodes of a size that are named
SAME = {
    STRONG: "strong scaling: the same global batch",
    "weak": "weak scaling: the same batch per rank",
}
# Heading, factor, key of its definition, and words of the legend
_ALL_FACTORS = (
    ("PE", "parallel", "parallel", "parallel efficiency"),
    ("LB", "load_balance", "load_balance", "load balance"),
    ("Comm", "communication", "communication", "communication efficiency"),
    ("input", "input", "no input", "no wait for input"),
)
_Factors = Sequence[tuple[str, str, str, str]]


def study_document(
    study: ScalingStudy, findings: Findings, width: int, running: Collection[Setup] = ()
) -> doc.Document:
    """Return the tables of all kinds, with what was found.

    Args:
        width: Columns of the terminal.
        running: The setups that run now, which are marked.
    """
    factors = _ALL_FACTORS if width >= WIDE else _ALL_FACTORS[:1]
    kinds: list[doc.Section] = []
    leads = []
    before = 0  # sizes of kinds before, in the JSON
    for kind in study.request.kinds:
        rows = size_rows(study, kind)
        if rows:
            found = findings.of_kind(kind)
            blocks = [*_sizes(rows, factors, before, running), *_sentences(study, kind, found)]
            name = f"{kind.capitalize()} scaling"
            kinds.append(doc.Section(kind, name, blocks, capitalized(SAME[kind])))
        if measured := measured_rows(study, kind):
            leads.append(_lead(kind, measured))
        before += len(rows)
    summary: list[doc.Block] = [doc.Line(" ".join(leads), doc.LEAD, doc.PAGE)]
    summary += [doc.Line(note, doc.DOUBT, doc.PAGE) for note in study.notes]
    end: list[doc.Block] = []
    if any(run.figures for run in study.runs):
        end.append(doc.Line(_legend(factors), doc.MUTED))
    end += [doc.Line(f"note: {note}", doc.DOUBT, doc.TERMINAL) for note in study.notes]
    end += [doc.Line(f"Energy: {line}", doc.MUTED, doc.PAGE) for line in _energy_notes(study)]
    about: list[doc.Text] = [
        doc.Part(" ".join([study.request.script, *study.request.args]), doc.CODE)
    ]
    if study.batch is not None and study.batch.text:
        about.append(f"batch: {study.batch.text}")
    return doc.Document(
        "Paceline: scaling study",
        f"Scaling of {study.name}",
        [
            doc.Section("summary", "Summary", summary),
            *kinds,
            doc.Section("legend", "", end),
            *_charts(study, leads),
            doc.Section(
                "factors", "Efficiencies", [_factor_table(study)], "POP efficiencies", doc.PAGE
            ),
            doc.Section("fits", "Fits", list(_fits(findings)), "Fitted models", doc.PAGE),
            doc.Section("runs", "Runs", [_runs(study)], "Runs and placement", doc.PAGE),
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


def _legend(factors: _Factors) -> str:
    parts = "".join(f"{heading}: {words}, " for heading, _, _, words in factors)
    return f"±: half of the 90 % interval. {parts}CS: computation scalability"


def _sizes(
    rows: Sequence[SizeRow], factors: _Factors, before: int, running: Collection[Setup]
) -> Iterator[doc.Block]:
    """Yield the table of a kind, and why sizes have no figures."""
    has_energy = any(row.energy for row in rows)
    has_device = any(row.device_bytes for row in rows)
    columns = doc.columns(
        *("ranks|rank", "nodes|node", "batch", "step|step time", "samples/s|samples/s"),
        *("speed-up|speed-up", "eff.|scaling efficiency"),
        *(f"{heading}|{term}" for heading, _, term, _ in factors),
        *("CS|computation scalability", "memory", *["device"] * has_device),
        *["J/sample|energy"] * has_energy,
        left=0,
    )
    cells = []
    for number, row in enumerate(rows, before):
        point, at = row.point, f"sizes.{number}"
        mark = "▸" if point.setup in running else ""
        head: list[doc.Text] = [
            [mark, doc.Part(str(point.ranks), figure=f"{at}.ranks")],
            doc.Part(str(point.hosts), figure=f"{at}.nodes"),
            doc.Part(f"{point.setup.global_batch:,}", figure=f"{at}.global_batch"),
        ]
        if row.throughput is None:
            rest: list[doc.Text] = [doc.Part("failed", doc.FAILED) if point.failure else "-"]
            cells.append(doc.Row([*head, *rest, *[""] * (len(columns) - 4)]))
            continue
        rest = [
            _interval(row.step, duration, f"{at}.step_s"),
            _range(row.throughput, amount, f"{at}.samples_per_s"),
            _range(row.speedup, "{:.2f}".format, f"{at}.speedup"),
            _graded_range(row.efficiency, f"{at}.scaling_efficiency"),
            *(doc.graded(row.pop.get(name), f"{at}.pop.{name}") for _, name, _, _ in factors),
            doc.graded(row.computation, f"{at}.computation_scalability"),
            size(row.memory_bytes) if row.memory_bytes else "-",
        ]
        if has_device:
            rest.append(size(row.device_bytes) if row.device_bytes else "-")
        if has_energy:
            rest.append(_energy(row))
        cells.append(doc.Row([*head, *rest]))
    yield doc.Table(columns, cells, is_dense=len(factors) == 1)
    for line in failures(rows):
        yield doc.Line(line, doc.FAILED)


def _energy(row: SizeRow) -> str:
    if row.energy is None:
        return "-"
    return f"{'~' if row.energy.is_estimate else ''}{figure(row.energy.joules)}"


def _interval(found: Estimate | None, show: Callable[[float], str], path: str) -> doc.Text:
    """Return a value with half of its interval in percent, and on a page with its ends."""
    if found is None:
        return "-"
    half = found.precision
    shown = f" ±{100 * half:.2g} %" if LEAST_SHOWN < half < math.inf else ""
    return [*_range(found, show, path), doc.in_terminal(shown)]


def _range(found: Estimate | None, show: Callable[[float], str], path: str) -> list[doc.Part]:
    """Return a value, and on a page the ends of its interval."""
    if found is None:
        return [doc.Part("-")]
    value = doc.Part(show(found.value), figure=f"{path}.value")
    if not (found.low and math.isfinite(found.high) and found.precision > LEAST_SHOWN):
        return [value]
    ends = f" {show(found.low)} to {show(found.high)}"
    return [value, doc.on_page(ends, "range")]


def _graded_range(found: Estimate | None, path: str) -> doc.Text:
    if found is None:
        return "-"
    return [doc.graded(found.value, f"{path}.value"), *_range(found, "{:.2f}".format, path)[1:]]


def _sentences(study: ScalingStudy, kind: str, findings: Findings) -> Iterator[doc.Block]:
    lines = [knee.text for knee in findings.knees]
    lines += [f"{reason.text} {reason.remedy}".strip() for reason in findings.reasons]
    lines += [fit_sentence(fit) for fit in findings.fits]
    lines += [prediction_sentence(checked) for checked in findings.predictions]
    yield doc.Bullets(lines)
    goal, found = goal_of(study), targets(study, kind)
    if goal is not None and found:
        yield doc.BLANK
        yield doc.Heading(f"until {goal}")
        yield _targets(study, found)
        yield doc.Bullets(target_sentences(found, goal))
    yield doc.Bullets(batch_sentences(batch_advice(study, kind)))


def _targets(study: ScalingStudy, found: Sequence[SizeTarget]) -> doc.Table:
    sizes = [row.point.setup for kind in study.request.kinds for row in size_rows(study, kind)]
    efficiency = "statistical eff.|statistical efficiency"
    headings = ("ranks|rank", "reached", "samples", efficiency, "time", "node-hours", "best")
    rows = []
    for target in found:
        at = f"sizes.{sizes.index(target.point.setup)}.target"
        cells: list[doc.Text] = [
            str(target.point.ranks),
            f"{target.reached} of {target.seeds}",
            _interval(target.samples, amount, f"{at}.samples"),
            _range(target.statistical_efficiency, "{:.2f}".format, f"{at}.statistical_efficiency"),
            _interval(target.seconds, duration, f"{at}.seconds"),
            _range(target.node_hours, figure, f"{at}.node_hours"),
            f"{target.best:.4g}" if target.best is not None else "-",
        ]
        rows.append(doc.Row(cells))
    return doc.Table(doc.columns(*headings, left=0), rows)


def _charts(study: ScalingStudy, leads: Sequence[str]) -> list[doc.Section]:
    """Return the sections with the charts of the page."""
    lead, goal = " ".join(leads), goal_of(study)
    speedup = (
        "Bars: 90 % confidence intervals. Dashed: the ideal speed-up. Dotted: fitted models, with "
        "their bands."
    )
    efficiency = (
        "Speed-up over the ratio of the numbers of ranks. An efficiency of 0.8 or above is good."
    )
    curves = doc.Charts(
        [doc.Chart("studySpeedup", speedup, lead), doc.Chart("studyEfficiency", efficiency, lead)]
    )
    losses = loss_charts(
        [kind for kind in study.request.kinds if measured_rows(study, kind)],
        " Strong scaling is ideal if bars halve with twice the ranks, weak scaling if they stay "
        "equal.",
    )
    time = "Samples to the target over samples/s; without start-up." if goal else ""
    hours = "Nodes times hours. Nodes are counted whole."
    costs = doc.Charts(
        [
            doc.Chart("studyTime", time or "Without start-up.", "Time by number of ranks"),
            doc.Chart("studyCost", hours, "Node-hours by number of ranks"),
        ]
    )
    of_what = "to the target" if goal else "for a million samples"
    return [
        doc.Section("curves", "Curves", [curves], "Speed-up and efficiency", doc.PAGE),
        doc.Section("losses", "Losses", losses, "Time per step, by state", doc.PAGE),
        doc.Section("costs", "Costs", [costs], f"Time and node-hours {of_what}", doc.PAGE),
    ]


def loss_charts(kinds: Sequence[str], more: str = "") -> list[doc.Block]:
    """Return the charts of the states of a step, by kind of scaling. more: for the caption."""
    caption = f"Mean of all ranks. The parts of a bar add up to the step time.{more}"
    charts = [
        doc.Chart(
            f"losses-{kind}",
            caption,
            f"Time per step by state, {kind} scaling",
            f"{kind.capitalize()} scaling",
        )
        for kind in kinds
    ]
    return [state_legend(STATE_NAMES), doc.Charts(charts)]


def _factor_table(study: ScalingStudy) -> doc.Table:
    """Return all POP efficiencies of all sizes."""
    rows = [row for kind in study.request.kinds for row in size_rows(study, kind)]
    values: dict[str, list[float | None]] = {
        "global_efficiency": [row.global_efficiency for row in rows],
        "computation_scalability": [row.computation for row in rows],
        **{f"pop.{name}": [row.pop[name] for row in rows] for name in EFFICIENCIES},
    }
    found = []
    for path, of_sizes in values.items():
        cells = [doc.graded(value, f"sizes.{at}.{path}", 3) for at, value in enumerate(of_sizes)]
        found.append(doc.Row([named_figure(path.removeprefix("pop.")), *cells]))
    headings = [f"{row.point.kind}, {counted(row.point.ranks, 'rank')}" for row in rows]
    return doc.Table(doc.columns("figure", *headings), found)


def _fits(findings: Findings) -> Iterator[doc.Block]:
    """Yield the parameters of the fitted models."""
    if not findings.fits:
        yield doc.Line("A fit needs at least two measured sizes.")
        return
    rows = [
        doc.Row(
            [
                fit.kind,
                fit.model,
                doc.Part(parameter.name, figure=f"fits.{at}.parameters.{number}.name"),
                f"{parameter.value:.4g}",
                f"{parameter.low:.3g} to {parameter.high:.3g}",
                parameter.unit,
                parameter.meaning,
            ]
        )
        for at, fit in enumerate(findings.fits)
        for number, parameter in enumerate(fit.parameters)
    ]
    names = ("scaling", "model", "parameter", "value", "95 % interval", "unit", "meaning")
    numbers = ("value", "95 % interval")
    yield doc.Table([doc.Column(name, right=name in numbers) for name in names], rows)


def _runs(study: ScalingStudy) -> doc.Table:
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
        cells: list[doc.Text] = [
            doc.Part(point.kind, figure=f"{at}.scaling"),
            str(point.ranks),
            doc.Part(str(len(point.runs)), figure=f"{at}.runs"),
            doc.Part(str(point.failed_runs), figure=f"{at}.failed_runs"),
            named,
        ]
        rows.append(doc.Row(cells))
    columns = doc.columns("scaling", "ranks", "runs", "failed")
    return doc.Table([*columns, doc.Column("node: ranks, cores", right=False)], rows)


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


MAX_SHOWN_PARAMETERS = 3  # of a fit; the cost model has more, which are on the page


def failures(rows: Sequence[SizeRow]) -> list[str]:
    """Return why sizes have no figures, in the words of the script."""
    found = []
    for row in rows:
        if row.point.failure and row.throughput is None:
            first = row.point.failure.strip().partition("\n")[0]
            found.append(f"{counted(row.point.ranks, 'rank')}: {first}")
    return found


def fit_sentence(fit: Fit) -> str:
    """Return the few parameters of a law with their intervals, and the error of the fit."""
    parameters = ""
    if 0 < len(fit.parameters) <= MAX_SHOWN_PARAMETERS:
        parameters = ", ".join(map(_parameter_words, fit.parameters)) + "; "
    if fit.error is None:
        error = "fewer than four sizes: the fit cannot be tested"
    else:
        error = f"leave-one-out error {percent(fit.error)}"
        error += f", at most {percent(fit.worst)}" if fit.worst is not None else ""
    return f"{fit.model}: {parameters}{error}{f'; {fit.note}' if fit.note else ''}"


def _parameter_words(parameter: Parameter) -> str:
    show = amount if parameter.unit == "samples/s" else "{:.3g}".format
    unit = f" {parameter.unit}" if parameter.unit else ""
    value, low, high = map(show, (parameter.value, parameter.low, parameter.high))
    return f"{parameter.name} = {value}{unit} ({low} to {high})"


def prediction_sentence(checked: CheckedPrediction) -> str:
    """Return a prediction, and the measurement of its size if there is one."""
    prediction = checked.prediction
    high = "no upper limit" if checked.high is None else amount(checked.high)
    text = (
        f"predicted for {counted(prediction.ranks, 'rank')}: {amount(prediction.throughput)} "
        f"samples/s ({amount(prediction.low)} to {high}), {prediction.model}"
    )
    if checked.measured is None or checked.error is None:
        return f"{text}; not measured yet"
    inside = "inside" if checked.is_inside else "outside of"
    return (
        f"{text}; measured: {amount(checked.measured.value)}, {inside} the interval, error "
        f"{100 * checked.error:+.1f} %"
    )


def batch_sentences(found: BatchAdvice | None) -> list[str]:
    """Return the noise scale, and steps and samples to the same loss for each larger batch."""
    if found is None:
        return []
    runs = counted(found.runs, "run")
    if found.samples is None or found.low is None or found.high is None:
        return [
            f"Gradient noise scale: undetermined in most of {runs}, because the gradient is not "
            "above its noise. Nothing is said of steps to a loss with the larger batches. HINT: "
            "paceline scale --critical-batch measures them"
        ]
    return [
        f"Gradient noise scale: {amount(found.samples)} samples (95 %: {amount(found.low)} to "
        f"{amount(found.high)}; median of {runs}). Relative to a batch of {amount(found.base)}, "
        "to the same loss:",
        *(
            f"  {counted(larger.ranks, 'rank')}{'' if larger.is_measured else ' (predicted)'}, "
            f"batch {amount(larger.batch)}: {_band(larger.steps)} of the steps, "
            f"{_band(larger.samples)} times the samples"
            for larger in found.larger
        ),
    ]


def _band(found: Band) -> str:
    value, low, high = found
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def target_sentences(sizes: Sequence[SizeTarget], goal: Goal) -> list[str]:
    """Return which size reaches the target soonest, which is cheapest, and which do not."""
    if not sizes:
        return []
    first, cheap = soonest(sizes), cheapest(sizes)
    found = []
    if first is None:
        found.append(f"No size reaches {goal} with every seed.")
    elif first.seconds is not None:
        ranks = counted(first.point.ranks, "rank")
        found.append(f"Soonest to {goal}: {ranks}, in {_span(first.seconds)}.")
    if cheap is not None and cheap.node_hours is not None:
        ranks = counted(cheap.point.ranks, "rank")
        found.append(f"Fewest node-hours: {ranks}, {amount(cheap.node_hours.value)}.")
    found += [_missed(size, goal) for size in sizes if not size.is_certain]
    return [*found, *filter(None, [learning_rate_sentence(sizes)])]


def learning_rate_sentence(sizes: Sequence[SizeTarget]) -> str:
    """Return how the learning rate follows the global batch; "" if it is not known."""
    rates = [size for size in sizes if size.learning_rate is not None]
    rule = learning_rate_rule(sizes)
    if rule is None or not rates:
        return ""
    values = ", ".join(
        f"{size.learning_rate:.4g} (batch {size.point.setup.global_batch:,})" for size in rates
    )
    if rule == UNCHANGED:
        return f"Learning rate: {values}. The script does not change it with the global batch."
    if rule == NO_RULE:
        return f"Learning rate: {values}: neither the linear nor the square-root rule."
    return f"Learning rate: {values}: the {rule} rule."


def _missed(size: SizeTarget, goal: Goal) -> str:
    best = "no value was seen" if size.best is None else f"the best value is {size.best:.6g}"
    of = f"{size.reached} of {counted(size.seeds, 'seed')}"
    ranks = counted(size.point.ranks, "rank")
    return f"With {ranks}, {of} reached {goal}; {best} (median of the seeds)."


def _span(found: Estimate) -> str:
    """Return a duration with its interval."""
    if not found.low or found.high == float("inf"):
        return duration(found.value)
    return f"{duration(found.value)} ({duration(found.low)} to {duration(found.high)})"
