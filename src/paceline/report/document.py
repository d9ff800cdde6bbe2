"""What a report shows, made once: headings, sentences, tables and charts.

``terminal/draw.py`` draws a document in the terminal, and ``page/assets/document.html`` on a page.
A part says where its value is in the JSON of the report, so that the page can be compared with it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..analyze.figures.report import Report
from .verdict import Verdict, end_sentence

GOOD_EFFICIENCY = 0.8  # an efficiency from this value on is good (POP Centre of Excellence)
NOT_KNOWN = "\N{EN DASH}"  # in place of a value
BOTH, PAGE, TERMINAL = "", "page", "terminal"  # where a block is shown
# Styles of parts and rows. Pages have CSS classes of these names.
LEAD, STRONG, MUTED, DOUBT, CODE = "lead", "strong", "note", "doubt", "code"
SMALL, RANGE, FIXED = "small", "range", "fixed"  # FIXED: lines are not broken
GOOD, LOW, BETTER, WORSE, FAILED = "good", "low", "better", "worse", "failed"
QUESTION = "question"


@dataclass(frozen=True)
class Part:
    """A piece of text.

    Attributes:
        text: The text.
        style: One of the styles above, or "".
        figure: Position of its value in the JSON, or "".
        term: Key of its definition, which pages show on hover; or "".
        where: BOTH, PAGE or TERMINAL.
        bar: Bar that a page draws instead of the text: name, colour (CSS variable) and share of
            the whole length of each segment.
    """

    text: str
    style: str = ""
    figure: str = ""
    term: str = ""
    where: str = BOTH
    bar: Sequence[tuple[str, str, float]] = ()


Text = str | Part | Sequence[str | Part]
NEW_LINE = Part("\n", where=PAGE)


def parts_of(text: Text, where: str) -> list[Part]:
    """Return the parts of a text that a medium shows."""
    pieces = [text] if isinstance(text, str | Part) else text
    parts = [Part(piece) if isinstance(piece, str) else piece for piece in pieces]
    return [part for part in parts if part.where in (BOTH, where)]


def text(template: str, where: str = BOTH, **parts: Part) -> list[Part]:
    """Return a text with terms and code: "[label|KEY], `code`, {part}"; KEY of a definition.

    A term without a key has that of its label. Texts of users are passed as parts.
    """
    found = []
    for piece in re.split(r"(\[[^]]+\]|`[^`]+`|\{\w+\})", template):
        if piece.startswith("["):
            label, _, key = piece[1:-1].partition("|")
            found.append(Part(label, term=key or label, where=where))
        elif piece.startswith("`"):
            found.append(Part(piece[1:-1], CODE, where=where))
        elif piece.startswith("{"):
            found.append(replace(parts[piece[1:-1]], where=where))
        elif piece:
            found.append(Part(piece, where=where))
    return found


def command(words: Sequence[str]) -> list[str | Part]:
    """Return a command for a page, which breaks its line between words and not in an option."""
    parts: list[str | Part] = []
    for word in words:
        parts += [Part(word, CODE, where=PAGE), Part(" ", where=PAGE)]
    return parts[:-1]


def graded(value: float | None, figure: str = "", digits: int = 2) -> Part:
    """Return an efficiency, with the style of a good or a low one."""
    if value is None:
        return Part(NOT_KNOWN, figure=figure)
    return Part(f"{value:.{digits}f}", GOOD if value >= GOOD_EFFICIENCY else LOW, figure)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        right: Whether its cells are aligned at the right.
        term: Key of the definition of its heading, or "".
        where: BOTH, PAGE or TERMINAL.
        width: Number of characters in the terminal; 0: that of its cells.
        ratio: Share of the rest of the terminal's width, where texts are cut; 0: ``width``.
    """

    heading: str
    right: bool = True
    term: str = ""
    where: str = BOTH
    width: int = 0
    ratio: int = 0


def on_page(text: str, style: str = "", figure: str = "", term: str = "") -> Part:
    """Return a part that only pages show."""
    return Part(text, style, figure, term, PAGE)


def in_terminal(text: str, style: str = "") -> Part:
    """Return a part that only the terminal shows."""
    return Part(text, style, where=TERMINAL)


def columns(*headings: str, left: int = 1) -> list[Column]:
    """Return the columns of headings: "HEADING" or "HEADING|KEY", KEY of a definition.

    The first ``left`` columns, and those without a heading, are aligned at the left.
    """
    found = []
    for number, heading in enumerate(headings):
        name, _, term = heading.partition("|")
        found.append(Column(name, right=number >= left and bool(name), term=term))
    return found


@dataclass(frozen=True)
class Row:
    """A row of a table. ``style`` is that of all of its cells."""

    cells: Sequence[Text]
    style: str = ""
    where: str = BOTH


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row names it.

    Attributes:
        where: BOTH, PAGE or TERMINAL.
        is_dense: Whether the terminal has one space between columns instead of two.
        has_headings: Whether the terminal shows the headings of the columns.
        is_breakable: Whether a narrow terminal breaks the lines of all columns, not only of the
            last one.
        name: CSS class on a page, or "".
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    where: str = BOTH
    is_dense: bool = False
    name: str = ""
    has_headings: bool = True
    is_breakable: bool = False

    def shown(self, where: str) -> tuple[list[Column], list[Row]]:
        """Return the columns and rows that a medium shows."""
        numbers = [i for i, column in enumerate(self.columns) if column.where in (BOTH, where)]
        rows = [
            replace(row, cells=[row.cells[i] for i in numbers if i < len(row.cells)])
            for row in self.rows
            if row.where in (BOTH, where)
        ]
        return [self.columns[i] for i in numbers], rows


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: Text
    where: str = BOTH


@dataclass(frozen=True)
class Line:
    """A paragraph. ``style``: of the whole paragraph."""

    text: Text
    style: str = ""
    where: str = BOTH


BLANK = Line("", where=TERMINAL)  # an empty line


def lines(texts: Iterable[str], style: str = "", where: str = BOTH) -> list[Line]:
    """Return a paragraph for each sentence that is not empty, with a full stop."""
    return [Line(end_sentence(text), style, where) for text in texts if text]


@dataclass(frozen=True)
class Bullets:
    """A list of sentences: with bullets on a page, as lines in the terminal."""

    sentences: Sequence[Text]
    where: str = BOTH


@dataclass(frozen=True)
class Item:
    """An entry of a list of findings.

    Attributes:
        label: Short label or share in front of it.
        text: What was found.
        lines: Evidence and what to do, each in a paragraph.
        style: Style of the entry on a page, or "".
        evidence: Figures that a page shows on a click, or None.
    """

    label: Text
    text: Text
    lines: Sequence[Text]
    style: str = ""
    where: str = BOTH
    evidence: "Folded | None" = None


@dataclass(frozen=True)
class Items:
    """Entries of a list without empty lines between them, such as the largest losses."""

    items: Sequence[Item]
    where: str = BOTH


@dataclass(frozen=True)
class Fact:
    """A figure of a page: its name, its value (None: it is not shown), and text after it."""

    name: str
    value: str | Sequence[Part] | None
    figure: str = ""
    term: str = ""
    after: str = ""

    def text(self) -> Text:
        """Return the value with its position in the JSON."""
        value = self.value or NOT_KNOWN
        parts = [Part(value, figure=self.figure)] if isinstance(value, str) else value
        return [*parts, self.after]


@dataclass(frozen=True)
class Facts:
    """Single figures of a page."""

    facts: Sequence[Fact]
    where: str = PAGE


@dataclass(frozen=True)
class Folded:
    """Blocks that a page shows on a click."""

    summary: str
    blocks: Sequence["Block"]
    where: str = PAGE


@dataclass(frozen=True)
class Choice:
    """A choice between ways to draw a chart: value and label of each; the first is chosen."""

    name: str
    question: str
    options: Sequence[tuple[str, str]]
    where: str = PAGE


@dataclass(frozen=True)
class Conclusion:
    """The three lines of a verdict."""

    verdict: Verdict
    where: str = BOTH


@dataclass(frozen=True)
class Chart:
    """A chart of a page, drawn by charts.js.

    Attributes:
        label: Description for screen readers.
        title: Heading above it, beside other charts; or "".
    """

    name: str
    caption: str
    label: str
    title: str = ""
    where: str = PAGE


@dataclass(frozen=True)
class Charts:
    """Charts side by side."""

    charts: Sequence[Chart]
    where: str = PAGE


@dataclass(frozen=True)
class Legend:
    """Meaning of colours: CSS variable (states have one of their name) and text of each."""

    colours: Sequence[tuple[str, Text]]
    where: str = PAGE


@dataclass(frozen=True)
class Nodes:
    """Nodes, bindings and versions of the ranks of a run. ``path``: of its report in the JSON."""

    report: Report
    path: str
    where: str = PAGE


Block = (
    Table
    | Heading
    | Line
    | Bullets
    | Item
    | Items
    | Facts
    | Folded
    | Choice
    | Conclusion
    | Chart
    | Charts
    | Legend
    | Nodes
)


Shown = TypeVar("Shown", bound="Part | Block | Section")


def only(where: str, shown: Iterable[Shown]) -> list[Shown]:
    """Return the blocks or parts that a medium shows, to be shown there only."""
    return [replace(part, where=where) for part in shown if part.where in (BOTH, where)]


@dataclass(frozen=True)
class Section:
    """A part of a document.

    Attributes:
        id: Its anchor on the page.
        name: Its name in the page's navigation.
        heading: Its heading; "" for none.
        blocks: What it contains.
        where: BOTH, PAGE or TERMINAL.
    """

    id: str
    name: str
    blocks: Sequence[Block]
    heading: Text = ""
    where: str = BOTH


def nodes_section(blocks: Sequence[Block]) -> Section:
    """Return the section of a page about the nodes of runs."""
    return Section("places", "Nodes", blocks, "Nodes, bindings and versions", PAGE)


@dataclass(frozen=True)
class Document:
    """A report.

    Attributes:
        title: Title of the page and of the frame in the terminal.
        heading: First heading of the page.
        about: Lines below it: commands and folders.
        sections: Its parts, in order.
    """

    title: Text
    heading: str
    sections: Sequence[Section]
    about: Sequence[Text] = field(default_factory=list)

    def parts(self, where: str) -> list[tuple[Section, list[Block]]]:
        """Return the sections that a medium shows, with the blocks that it shows."""
        found = []
        for section in self.sections:
            if section.where in (BOTH, where):
                blocks = [block for block in section.blocks if block.where in (BOTH, where)]
                found.append((section, blocks))
        return [(section, blocks) for section, blocks in found if blocks]
