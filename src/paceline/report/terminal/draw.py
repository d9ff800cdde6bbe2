"""Draw documents in the terminal."""

from collections.abc import Callable, Iterable

from rich import table as rich_table
from rich.console import Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.text import Text as RichText

from ..console import PlainConsole, output_width
from ..document import (
    BETTER,
    DOUBT,
    FAILED,
    GOOD,
    LEAD,
    LOW,
    MUTED,
    QUESTION,
    STRONG,
    TERMINAL,
    WORSE,
    Block,
    Bullets,
    Conclusion,
    Document,
    Heading,
    Item,
    Line,
    Table,
    Text,
    parts_of,
)
from ..verdict.table import verdict_table

STYLES = {
    LEAD: "bold",
    STRONG: "bold",
    MUTED: "bright_black",
    DOUBT: "yellow",
    GOOD: "green",
    LOW: "bold red",
    BETTER: "bold green",
    WORSE: "bold red",
    FAILED: "red",
    QUESTION: "bold yellow",
}


def draw_panel(document: Document) -> Panel:
    """Return a document in a frame with its title."""
    return Panel(Group(*draw_document(document)), title=document.title, expand=False)


def print_panel(make: Callable[[int], Document]) -> None:
    """Print the document of a number of columns to standard output, in a frame."""
    console = PlainConsole(width=output_width())
    console.print(draw_panel(make(console.width)))


def draw_document(document: Document) -> list[RenderableType]:
    """Return the blocks of a document, with an empty line between the sections."""
    about = [_text(one) for one in document.about]
    drawn: list[RenderableType] = [line for line in about if line.plain]
    for section, blocks in document.parts(TERMINAL):
        drawn += [RichText()] if drawn else []
        heading = _text(section.heading, STRONG)
        drawn += [heading] if heading.plain else []
        drawn += draw(blocks)
    return drawn


def draw(blocks: Iterable[Block]) -> list[RenderableType]:
    """Return blocks as they are drawn in the terminal."""
    found: list[RenderableType] = []
    for block in blocks:
        if isinstance(block, Table):
            found.append(draw_table(block))
        elif isinstance(block, Line):
            found.append(_text(block.text, block.style))
        elif isinstance(block, Bullets):
            found += map(_text, block.sentences)
        elif isinstance(block, Heading):
            found.append(_text(block.text, STRONG))
        elif isinstance(block, Item):
            found += [_item(block), RichText()]
        elif isinstance(block, Conclusion):
            found.append(verdict_table(block.verdict))
    return found


def _item(item: Item) -> RichText:
    drawn = RichText()
    drawn.append(item.label.text, STYLES.get(item.label.style)).append("  ")
    drawn.append_text(_text(item.text))
    for line in map(_text, item.lines):
        if line.plain:
            drawn.append("\n  ").append_text(line)
    return drawn


def draw_table(table: Table) -> rich_table.Table:
    """Return a table without lines; text between right-aligned columns is not broken."""
    space = 1 if table.is_dense else 2
    drawn = rich_table.Table(box=None, pad_edge=False, padding=(0, space, 0, 0))
    for column in table.columns:
        justify: JustifyMethod = "right" if column.right else "left"
        drawn.add_column(column.heading, justify=justify, no_wrap=column.right)
    for row in table.rows:
        drawn.add_row(*map(_text, row.cells), style=STYLES.get(row.style))
    return drawn


def _text(text: Text, style: str = "") -> RichText:
    drawn = RichText(style=STYLES.get(style, ""))
    for part in parts_of(text, TERMINAL):
        drawn.append(part.text, STYLES.get(part.style))
    return drawn
