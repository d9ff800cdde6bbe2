"""Tables over several runs: before and after, and scaling."""

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..analyze.compare import Change, Scale
from ..analyze.report import Report
from .terminal import GOOD

_NAMES = {
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
    "other": "no other work",
    "computation_scalability": "computation scalability",
    "global_efficiency": "global efficiency",
    "speedup": "speed-up",
    "scaling_efficiency": "scaling efficiency",
}


def compared(before: Report, after: Report, changes: list[Change]) -> Panel:
    """Before and after, with what is noise said."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "before", "after", "change"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_column("")
    for change in changes:
        relative = change.after / change.before - 1 if change.before else 0.0
        if change.real is None:
            verdict, style = "too few steps to tell it from noise", "bright_black"
        elif not change.real:
            verdict, style = "within the noise", "bright_black"
        else:
            better = (change.after > change.before) != (change.figure == "step_ms")
            verdict, style = ("better", "bold green") if better else ("worse", "bold red")
        cells = (_number(change.before), _number(change.after), f"{100 * relative:+.1f} %")
        table.add_row(_NAMES[change.figure], *cells, Text(verdict, style=style))
    about = Text(f"before: {before.name}\nafter:  {after.name}\n")
    doubts = [f"{r.name}: {doubt}." for r in (before, after) for doubt in r.doubts]
    return Panel(
        Group(about, table, *(Text(doubt, style="yellow") for doubt in doubts)),
        title="Paceline: before and after",
        expand=False,
    )


def scaled(scales: list[Scale], reports: list[Report]) -> Panel:
    """Efficiencies per number of ranks; the first is the reference."""
    table = Table(box=None, pad_edge=False)
    table.add_column("ranks")
    for scale in scales:
        table.add_column(str(scale.ranks), justify="right")
    rows = (
        *("global_efficiency", "parallel", "load_balance", "communication", "serialisation"),
        *("transfer", "checkpoint", "validation", "input", "other", "computation_scalability"),
    )
    for name in rows:
        values = [getattr(scale, name) for scale in scales]
        if any(value is not None for value in values):
            table.add_row(_NAMES[name], *(_graded(value) for value in values))
    table.add_section()
    for name in ("samples_per_s", "speedup", "scaling_efficiency"):
        values = [getattr(scale, name) for scale in scales]
        if any(value is not None for value in values):
            cells = ("-" if value is None else _number(value) for value in values)
            table.add_row(_NAMES[name], *cells)
    doubts = [f"{report.name}: {doubt}." for report in reports for doubt in report.doubts]
    return Panel(
        Group(table, *(Text(doubt, style="yellow") for doubt in doubts)),
        title="Paceline: scaling",
        expand=False,
    )


def _graded(value: float | None) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.3f}", style="green" if value >= GOOD else "bold red")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 10 else f"{value:.3f}"
