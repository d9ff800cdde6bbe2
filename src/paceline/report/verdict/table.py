"""The three lines at the top of a report in the terminal."""

from rich.table import Table
from rich.text import Text

from .verdict import Verdict


def verdict_table(verdict: Verdict) -> Table:
    """Return the lines "Verdict", "Why" and "Next"; long ones continue under their sentence."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, sentence in verdict.lines():
        table.add_row(label, Text(sentence, style="bold" if label == "Verdict" else ""))
    return table
