"""What a report shows, made once: headings, sentences, tables and charts.

``terminal/draw.py`` draws a document in the terminal, and ``page/assets/document.html`` on a page.
A part says where its value is in the JSON of the report, so that the page can be compared with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..analyze.figures.report import Report
from .verdict.verdict import Verdict

GOOD_EFFICIENCY = 0.8  # an efficiency from this value on is good (POP Centre of Excellence)
NOT_KNOWN = "\N{EN DASH}"  # in place of a value
BOTH, PAGE, TERMINAL = "", "page", "terminal"  # where a block is shown
# Styles of parts and rows. Pages have CSS classes of these names.
LEAD, STRONG, MUTED, DOUBT, CODE = "lead", "strong", "note", "doubt", "code"
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
    """

    text: str
    style: str = ""
    figure: str = ""
    term: str = ""
    where: str = BOTH


Text = str | Part | Sequence[str | Part]


def parts_of(text: Text, where: str) -> list[Part]:
    """Return the parts of a text that a medium shows."""
    pieces = [text] if isinstance(text, str | Part) else text
    parts = [Part(one) if isinstance(one, str) else one for one in pieces]
    return [part for part in parts if part.where in (BOTH, where)]


def graded(value: float | None, figure: str = "", digits: int = 2) -> Part:
    """Return an efficiency, with the style of a good or a low one."""
    if value is None:
        return Part(NOT_KNOWN, figure=figure)
    return Part(f"{value:.{digits}f}", GOOD if value >= GOOD_EFFICIENCY else LOW, figure)


@dataclass(frozen=True)
class Column:
    """A column of a table. ``term``: key of the definition of its heading, or ""."""

    heading: str
    right: bool = True
    term: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table. ``style`` is that of all of its cells."""

    cells: Sequence[Text]
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row names it.

    Attributes:
        where: BOTH, PAGE or TERMINAL.
        is_dense: Whether the terminal has one space between columns instead of two.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    where: str = BOTH
    is_dense: bool = False


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


@dataclass(frozen=True)
class Bullets:
    """A list of sentences: with bullets on a page, as lines in the terminal."""

    sentences: Sequence[Text]
    where: str = BOTH


@dataclass(frozen=True)
class Item:
    """An entry of a list of findings.

    Attributes:
        label: Short label in front of it.
        text: What was found.
        lines: Evidence and what to do, each in a paragraph.
        style: Style of the entry on a page, or "".
    """

    label: Part
    text: Text
    lines: Sequence[Text]
    style: str = ""
    where: str = BOTH


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
    """Colours of the states: (state, name) of each."""

    states: Sequence[tuple[str, str]]
    where: str = PAGE


@dataclass(frozen=True)
class Nodes:
    """Nodes, bindings and versions of the ranks of a run. ``path``: of its report in the JSON."""

    report: Report
    path: str
    where: str = PAGE


Block = Table | Heading | Line | Bullets | Item | Conclusion | Chart | Charts | Legend | Nodes


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


@dataclass(frozen=True)
class Document:
    """A report.

    Attributes:
        title: Title of the page and of the panel in the terminal.
        heading: First heading of the page.
        about: Lines below it: commands and folders.
        sections: Its parts, in order.
    """

    title: str
    heading: str
    sections: Sequence[Section]
    about: Sequence[Text] = field(default_factory=list)

    def parts(self, where: str) -> list[tuple[Section, list[Block]]]:
        """Return the sections that a medium shows, with the blocks that it shows."""
        found = []
        for section in self.sections:
            if section.where in (BOTH, where):
                blocks = [one for one in section.blocks if one.where in (BOTH, where)]
                found.append((section, blocks))
        return [(section, blocks) for section, blocks in found if blocks]
