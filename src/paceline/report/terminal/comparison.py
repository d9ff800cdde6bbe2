"""Tables that compare several runs: before and after, and scaling."""

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...analyze.figures.compare_runs import (
    BETWEEN_RUNS,
    FigureChange,
    Gate,
    Reports,
    ScalingRow,
    StateChange,
    StateChanges,
    chance_limit,
)
from ...analyze.figures.report import Report
from ..numbers import counted, duration, figure, signed_duration
from ..state_names import STATE_NAMES
from .run_report import GOOD_EFFICIENCY

NAMES = {
    "samples_per_s": "samples/s",
    "step_ms": "step (ms)",
    "useful": "useful (the product)",
    "parallel": "parallel efficiency",
    "load_balance": "  load balance",
    "communication": "  communication efficiency",
    "serialisation": "    serialisation",
    "transfer": "    transfer",
    "checkpoint": "no checkpoint",
    "validation": "no validation",
    "input": "no wait for input",
    "starved": "no wait for a core",
    "other": "no other work",
    "bubble": "no pipeline bubble",
    "computation_scalability": "computation scalability",
    "global_efficiency": "global efficiency",
    "speedup": "speed-up",
    "scaling_efficiency": "scaling efficiency",
}
# Figures of a scaling table, from the global efficiency to its factors.
FACTORS = (
    *("global_efficiency", "parallel", "load_balance", "communication", "serialisation"),
    *("transfer", "checkpoint", "validation", "input", "starved", "other", "bubble"),
    "computation_scalability",
)


def render(
    before: Reports,
    after: Reports,
    changes: list[FigureChange],
    states: StateChanges | None = None,
    gate: Gate | None = None,
) -> Panel:
    """Return tables of runs before and after that mark the changes within the noise."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "before", "after", "change"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_column("")
    for change in changes:
        relative = change.after / change.before - 1 if change.before else 0.0
        told, kind = verdict(change)
        cells = (figure(change.before), figure(change.after), f"{100 * relative:+.1f} %")
        table.add_row(NAMES[change.figure], *cells, Text(told, style=_STYLES[kind]))
    lines = [f"before: {report.name}" for report in before]
    lines += [f"after:  {report.name}" for report in after]
    doubts = [f"{r.name}: {doubt}." for r in (*before, *after) for doubt in r.doubts]
    chance = describe_chance(before, after, changes)
    verdicts = [Text(f"\n{describe_gate(gate)}", style=_GATE_STYLES[gate.verdict])] if gate else []
    return Panel(
        Group(
            *(Text("\n".join(lines) + "\n"), table),
            *([Text(f"\n{chance}")] if chance else []),
            *_states(states),
            *verdicts,
            *(Text(doubt, style="yellow") for doubt in doubts),
        ),
        title="Paceline: before and after",
        expand=False,
    )


def describe_chance(before: Reports, after: Reports, changes: list[FigureChange]) -> str:
    """Say which difference of the step times may be chance, and how that is known."""
    limit = chance_limit(changes)
    if limit is None:
        return ""
    chance = f"differences of the step time below {100 * limit:.1f} % can be chance"
    if len(before) + len(after) < 4:
        few = (
            "One run of each"
            if len(before) + len(after) == 2
            else f"{counted(len(before), 'run')} before and {counted(len(after), 'run')} after"
        )
        return (
            f"{few}: {chance}, if equal runs differ by {100 * BETWEEN_RUNS:.1f} % (standard "
            "deviation). HINT: --baseline DIR adds further runs, from which this is measured"
        )
    runs = f"{counted(len(before), 'run')} before and {counted(len(after), 'run')} after"
    return f"{runs}: {chance}, as measured between these runs."


def describe_gate(gate: Gate) -> str:
    """Say whether the runs are slower than the baseline by more than the tolerance."""
    slower = f"{100 * abs(gate.slower):.1f} % {'longer' if gate.slower >= 0 else 'shorter'}"
    what = (
        f"Gate of {100 * gate.tolerance:g} %: a step takes {slower}, of which "
        f"{100 * gate.noise:.1f} % can be chance"
    )
    if gate.verdict == "uncertain":
        return f"{what}: passed, but not sure. HINT: --baseline DIR adds further runs"
    return f"{what}: {'failed' if gate.verdict == 'slower' else 'passed'}."


_GATE_STYLES = {"slower": "bold red", "uncertain": "yellow", "passed": "bold green"}


def _states(found: StateChanges | None) -> list[RenderableType]:
    """Return the table of the states' times, and the sentence that explains the change."""
    if found is None:
        return []
    table = Table(box=None, pad_edge=False)
    for heading in (f"time per {found.unit}", "before", "after", "change", "noise", ""):
        table.add_column(
            heading, justify="right" if heading not in ("", f"time per {found.unit}") else "left"
        )
    for row in [*found.rows, found.whole]:
        told, kind = state_verdict(row)
        name = f"whole {found.unit}" if row is found.whole else STATE_NAMES[row.state]
        times = (duration(row.before_s), duration(row.after_s), signed_duration(row.longer_s))
        table.add_row(name, *times, noise_of(row), Text(told, style=_STYLES[kind]))
    return [Text(), table, Text(f"\n{explanation(found)}", style="bold")]


def noise_of(row: StateChange) -> str:
    """Format the difference up to which a state's change is noise."""
    return "" if row.limit_s is None else f"± {duration(row.limit_s)}"


def state_verdict(row: StateChange) -> tuple[str, str]:
    """Return whether a state's time has changed, as ``verdict`` does."""
    if row.real is None:
        return "too few steps to distinguish it from noise", "none"
    if not row.real:
        return "within the noise", "none"
    return ("longer", "worse") if row.longer_s > 0 else ("shorter", "better")


def explanation(found: StateChanges) -> str:
    """Say by how much a step takes longer, and which states explain it."""
    whole = found.whole
    if whole.real is False or not whole.longer_s:
        return f"A {found.unit} takes as long as before, within the noise."
    how = "longer" if whole.longer_s > 0 else "less"
    sure = (
        "; the runs have too few steps to distinguish that from noise" if whole.real is None else ""
    )
    took = f"A {found.unit} takes {duration(abs(whole.longer_s))} {how}{sure}"
    if not found.explained_by:
        return f"{took}. No state alone explains it."
    rows = {row.state: row for row in found.rows}
    parts = [
        f"{STATE_NAMES[name]} {signed_duration(rows[name].longer_s)} "
        f"({100 * rows[name].longer_s / whole.longer_s:.0f} %)"
        for name in found.explained_by
    ]
    return f"{took}. It is explained by {', '.join(parts)}."


_STYLES = {"better": "bold green", "worse": "bold red", "none": "bright_black"}


def verdict(change: FigureChange) -> tuple[str, str]:
    """Return whether a change exceeds the noise, in words, and "better", "worse" or "none"."""
    if change.real is None:
        return "too few steps to distinguish it from noise", "none"
    if not change.real:
        return "within the noise", "none"
    better = (change.after > change.before) != (change.figure == "step_ms")
    return ("better", "better") if better else ("worse", "worse")


def scaled(scales: list[ScalingRow], reports: list[Report]) -> Panel:
    """Return a table of the efficiencies by number of ranks; the first run is the reference."""
    table = Table(box=None, pad_edge=False)
    table.add_column("ranks")
    for scale in scales:
        table.add_column(str(scale.ranks), justify="right")
    for name in FACTORS:
        values = [getattr(scale, name) for scale in scales]
        if any(value is not None for value in values):
            table.add_row(NAMES[name], *(_graded(value) for value in values))
    table.add_section()
    for name in ("samples_per_s", "speedup", "scaling_efficiency"):
        values = [getattr(scale, name) for scale in scales]
        if any(value is not None for value in values):
            cells = ("-" if value is None else figure(value) for value in values)
            table.add_row(NAMES[name], *cells)
    doubts = [f"{report.name}: {doubt}." for report in reports for doubt in report.doubts]
    return Panel(
        Group(table, *(Text(doubt, style="yellow") for doubt in doubts)),
        title="Paceline: scaling",
        expand=False,
    )


def _graded(value: float | None) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.3f}", style="green" if value >= GOOD_EFFICIENCY else "bold red")
