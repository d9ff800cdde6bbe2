"""Tables of a scaling study: one line for each size."""

import math
from collections.abc import Callable, Collection, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ....analyze.scaling.derived import Estimate
from ....analyze.scaling.outcomes.batch_advice import batch_advice
from ....analyze.scaling.outcomes.targets import SizeTarget, goal_of, targets
from ....analyze.scaling.study_model import STRONG, ScalingStudy, Setup
from ...numbers import amount, counted, duration, figure, percent, size
from ...scaling.batch_sentences import batch_sentences
from ...scaling.findings import CheckedPrediction, Findings, Fit, FittedParameter
from ...scaling.size_rows import SizeRow, size_rows
from ...scaling.target_sentences import target_sentences
from ..run_report import GOOD_EFFICIENCY

WIDE = 118  # columns of a terminal from which on all POP factors are shown
LEAST_SHOWN = 1e-5  # of an interval relative to its value
MAX_SHOWN_PARAMETERS = 3  # of a fit; the cost model has more, which are on the page
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


def study_panel(
    study: ScalingStudy, findings: Findings, width: int, running: Collection[Setup] = ()
) -> Panel:
    """Return the tables of all kinds, with what was found.

    Args:
        width: Columns of the terminal.
        running: The setups that run now, which are marked.
    """
    parts: list[RenderableType] = [Text(_about(study))]
    for kind in study.request.kinds:
        rows = size_rows(study, kind)
        if rows:
            parts += [Text(f"\n{SAME[kind]}", style="bold"), _sizes(rows, width, running)]
            parts += [Text(line, style="red") for line in failures(rows)]
            parts += _sentences(findings.of_kind(kind))
            parts += _targets(study, kind)
            parts += [Text(line) for line in batch_sentences(batch_advice(study, kind))]
    if any(run.figures for run in study.runs):
        parts.append(Text(f"\n{_legend(width)}", style="bright_black"))
    parts += [Text(f"note: {note}", style="yellow") for note in study.notes]
    return Panel(Group(*parts), title="Paceline: scaling study", expand=False)


def _about(study: ScalingStudy) -> str:
    words = " ".join([study.request.script, *study.request.args])
    if study.batch is None or not study.batch.text:
        return words
    return f"{words}\nbatch: {study.batch.text}"


def _legend(width: int) -> str:
    names = [name for _, name in _factors(width)] + ["CS"]
    parts = ", ".join(f"{name}: {_LEGEND[name]}" for name in names)
    return f"±: half of the 90 % interval. {parts}"


def _factors(width: int) -> Sequence[tuple[str, str]]:
    return _ALL_FACTORS if width >= WIDE else _FEW_FACTORS


def _sizes(rows: list[SizeRow], width: int, running: Collection[Setup]) -> Table:
    is_wide = width >= WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 2 if is_wide else 1, 0, 0))
    factors = _factors(width)
    has_energy = any(row.energy for row in rows)
    has_device = any(row.device_bytes for row in rows)
    headings = ["ranks", "nodes", "batch", "step", "samples/s", "speed-up", "eff."]
    headings += [name for _, name in factors] + ["CS", "memory"]
    headings += ["device"] * has_device + ["J/sample"] * has_energy
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        point = row.point
        mark = "▸" if point.setup in running else ""
        head = [f"{mark}{point.ranks}", str(point.hosts), f"{point.setup.global_batch:,}"]
        if row.throughput is None:
            table.add_row(*head, Text("failed", style="bold red") if point.failure else "-")
            continue
        cells: list[str | Text] = [
            _interval(row.step, duration),
            amount(row.throughput.value),
            f"{row.speedup.value:.2f}" if row.speedup is not None else "-",
            _graded(row.efficiency.value if row.efficiency is not None else None),
            *(_graded(row.pop.get(name)) for name, _ in factors),
            _graded(row.computation),
            size(row.memory_bytes) if row.memory_bytes else "-",
        ]
        if has_device:
            cells.append(size(row.device_bytes) if row.device_bytes else "-")
        if has_energy:
            cells.append(_energy(row))
        table.add_row(*head, *cells)
    return table


def failures(rows: list[SizeRow]) -> list[str]:
    """Return why sizes have no figures, in the words of the script."""
    found = []
    for row in rows:
        if row.point.failure and row.throughput is None:
            first = row.point.failure.strip().partition("\n")[0]
            found.append(f"{counted(row.point.ranks, 'rank')}: {first}")
    return found


def _energy(row: SizeRow) -> str:
    if row.energy is None:
        return "-"
    return f"{'~' if row.energy.is_estimate else ''}{figure(row.energy.joules)}"


def _interval(found: Estimate | None, show: Callable[[float], str]) -> str:
    if found is None:
        return "-"
    half = found.precision
    return show(found.value) + (f" ±{100 * half:.2g} %" if LEAST_SHOWN < half < math.inf else "")


def _graded(value: float | None) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.2f}", style="green" if value >= GOOD_EFFICIENCY else "bold red")


def _sentences(findings: Findings) -> list[RenderableType]:
    lines = [one.text for one in findings.knees]
    lines += [f"{reason.text} {reason.remedy}".strip() for reason in findings.reasons]
    lines += [fit_sentence(one) for one in findings.fits]
    lines += [prediction_sentence(one) for one in findings.predictions]
    return [Text(line) for line in lines]


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


def _parameter_words(one: FittedParameter) -> str:
    show = amount if one.unit == "samples/s" else "{:.3g}".format
    unit = f" {one.unit}" if one.unit else ""
    return f"{one.name} = {show(one.value)}{unit} ({show(one.low)} to {show(one.high)})"


def prediction_sentence(checked: CheckedPrediction) -> str:
    """Return a prediction, and the measurement of its size if there is one."""
    one = checked.prediction
    high = "no upper limit" if checked.high is None else amount(checked.high)
    text = (
        f"predicted for {counted(one.ranks, 'rank')}: {amount(one.throughput)} samples/s "
        f"({amount(one.low)} to {high}), {one.model}"
    )
    if checked.measured is None or checked.error is None:
        return f"{text}; not measured yet"
    inside = "inside" if checked.is_inside else "outside of"
    return (
        f"{text}; measured: {amount(checked.measured.value)}, {inside} the interval, error "
        f"{100 * checked.error:+.1f} %"
    )


def _targets(study: ScalingStudy, kind: str) -> list[RenderableType]:
    goal, found = goal_of(study), targets(study, kind)
    if goal is None or not found:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in (
        "ranks",
        "reached",
        "samples",
        "statistical eff.",
        "time",
        "node-hours",
        "best",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        table.add_row(*_target_cells(one))
    lines = [Text(line) for line in target_sentences(found, goal)]
    return [Text(f"\nuntil {goal}", style="bold"), table, *lines]


def _target_cells(one: SizeTarget) -> list[str]:
    efficiency = one.statistical_efficiency
    return [
        str(one.point.ranks),
        f"{one.reached} of {one.seeds}",
        _interval(one.samples, amount),
        f"{efficiency.value:.2f}" if efficiency is not None else "-",
        _interval(one.seconds, duration),
        figure(one.node_hours.value) if one.node_hours is not None else "-",
        f"{one.best:.4g}" if one.best is not None else "-",
    ]
