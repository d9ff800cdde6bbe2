"""A table of the batches from which the critical batch follows."""

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ....analyze.scaling.critical.critical_model import StoredCritical
from ....analyze.scaling.critical.judgement import CriticalBatch
from ....security.text import printable
from ...numbers import amount, counted
from ...scaling.critical_report import critical_sentences, difference_text, verdict_text


def critical_panel(stored: StoredCritical, found: CriticalBatch) -> Panel:
    """Return the table with the result."""
    point, request = found.point, stored.request
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("batch", "times", "learning rate", "runs", "loss", "over the base's (95 %)"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for one in found.results:
        parts = f" in {one.parts} parts" if one.parts > 1 else ""
        table.add_row(
            f"{amount(one.batch)}{parts}",
            str(one.multiple),
            f"x {one.rate_factor:.3g}",
            str(one.runs),
            "-" if one.loss is None else f"{one.loss:.4g}",
            difference_text(one),
            printable(verdict_text(one, request.tolerance)),
        )
    where = f"from step {point.step}" if point.step else "from the script's checkpoint"
    about = (
        f"{counted(request.ranks, 'rank')}, {where}, "
        f"{counted(point.window, 'sample')} a run; mean loss of the last quarter"
    )
    lines = [Text(printable(line)) for line in critical_sentences(stored, found)]
    notes = [Text(printable(line), style="yellow") for line in stored.notes]
    shown: list[RenderableType] = [Text(about), Text(""), table, Text(""), *lines, *notes]
    return Panel(Group(*shown), title="Paceline: critical batch", expand=False)
