"""Draw documents in the terminal."""

from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...security.text import printable
from .. import document as doc
from ..console import PlainConsole, output_width
from ..verdict import Verdict

STATE_COLOURS = {
    "useful": "green",
    "input": "yellow",
    "checkpoint": "cyan",
    "validation": "blue",
    "starved": "bright_red",
    "other": "bright_black",
    "bubble": "bright_yellow",
    "wait": "red",
    "transfer": "magenta",
    "background": "bright_black",
}
STYLES = {
    doc.LEAD: "bold",
    doc.STRONG: "bold",
    doc.MUTED: "bright_black",
    doc.DOUBT: "yellow",
    doc.GOOD: "green",
    doc.LOW: "bold red",
    doc.BETTER: "bold green",
    doc.WORSE: "bold red",
    doc.FAILED: "red",
    doc.QUESTION: "bold yellow",
    **{f"state-{state}": colour for state, colour in STATE_COLOURS.items()},
}


def draw_panel(document: doc.Document) -> Panel:
    """Return a document in a frame with its title."""
    return Panel(Group(*draw_document(document)), title=_text(document.title), expand=False)


def print_panel(make: Callable[[int], doc.Document]) -> None:
    """Print the document of a number of columns to standard output, in a frame."""
    console = PlainConsole(width=output_width())
    console.print(draw_panel(make(console.width)))


def print_document(make: Callable[[int], doc.Document]) -> None:
    """Print the document of a number of columns to standard output, without a frame."""
    console = PlainConsole()
    console.print(Group(*draw_document(make(console.width))))


def print_blocks(blocks: Iterable[doc.Block]) -> None:
    """Print blocks to standard output."""
    PlainConsole().print(Group(*draw(blocks)))


def draw_document(document: doc.Document) -> list[RenderableType]:
    """Return the blocks of a document, with an empty line between the sections."""
    about = [_text(text) for text in document.about]
    drawn: list[RenderableType] = [line for line in about if line.plain]
    for section, blocks in document.parts(doc.TERMINAL):
        drawn += [Text()] if drawn and drawn[-1] != Text() else []
        heading = _text(section.heading, doc.STRONG)
        drawn += [heading] if heading.plain else []
        drawn += draw(blocks)
    return drawn


def draw(blocks: Iterable[doc.Block]) -> list[RenderableType]:
    """Return blocks as they are drawn in the terminal."""
    found: list[RenderableType] = []
    for block in blocks:
        if isinstance(block, doc.Table):
            found.append(draw_table(block))
        elif isinstance(block, doc.Line):
            found.append(_text(block.text, block.style))
        elif isinstance(block, doc.Bullets):
            found += map(_text, block.sentences)
        elif isinstance(block, doc.Heading):
            found.append(_text(block.text, doc.STRONG))
        elif isinstance(block, doc.Item):
            found += [_item(block), Text()]
        elif isinstance(block, doc.Items):
            found += map(_item, block.items)
        elif isinstance(block, doc.Conclusion):
            found.append(verdict_table(block.verdict))
    return found


def _item(item: doc.Item) -> Text:
    drawn = _text(item.label).append("  ").append_text(_text(item.text))
    for line in map(_text, item.lines):
        if line.plain:
            drawn.append("\n  ").append_text(line)
    return drawn


def draw_table(table: doc.Table) -> Table:
    """Return a table without lines; only its last column is broken, if that has text.

    A breakable one is broken in all columns.
    """
    columns, rows = table.shown(doc.TERMINAL)
    padding = (0, 1 if table.is_dense else 2, 0, 0)
    is_wide = any(column.ratio for column in columns)
    drawn = Table(
        box=None, pad_edge=False, padding=padding, expand=is_wide, show_header=table.has_headings
    )
    last = columns[-1]
    for column in columns:
        drawn.add_column(
            column.heading,
            justify="right" if column.right else "left",
            no_wrap=not table.is_breakable and (column.right or not (column is last or last.right)),
            width=column.width or None,
            ratio=column.ratio or None,
        )
    for row in rows:
        drawn.add_row(*map(_text, row.cells), style=STYLES.get(row.style))
    return drawn


def _text(text: doc.Text, style: str = "") -> Text:
    drawn = Text(style=STYLES.get(style, ""), no_wrap=style == doc.FIXED)
    for part in doc.parts_of(text, doc.TERMINAL):
        drawn.append(printable(part.text, lines=True), STYLES.get(part.style))
    return drawn


def verdict_table(verdict: Verdict) -> Table:
    """Return the lines "Verdict", "Why" and "Next"; long ones continue under their sentence."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, sentence in verdict.lines():
        table.add_row(label, Text(sentence, style="bold" if label == "Verdict" else ""))
    return table
