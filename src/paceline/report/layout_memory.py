"""Table of the memory of a rank in each layout: ``paceline run --show-memory``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..cost.layout import Layout
from ..cost.layout_memory import WORDS, LayoutMemory, choose_layout
from .numbers import counted, size

FORMAT, VERSION = "paceline-memory", 1


def memory_json(predicted: Sequence[LayoutMemory], available: int) -> dict[str, Any]:
    """Return the predictions as the value of ``--json``.

    Args:
        available: Bytes that a rank of this node may take.
    """
    rows = [
        {
            "layout": one.axes,
            "recompute": one.layout.recompute,
            "peak_bytes": one.memory.total,
            **{f"{name}_bytes": value for name, value in asdict(one.memory).items()},
            "phase": one.phase,
            "module": one.module,
            "line": one.line or None,
            "fits": one.memory.total <= available,
        }
        for one in predicted
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "ranks": predicted[0].ranks,
        "available_bytes": available,
        "layouts": rows,
    }


def render(
    predicted: Sequence[LayoutMemory], available: int, problems: Mapping[Layout, str]
) -> Group:
    """Return the predictions as text for the terminal.

    problems: Why layouts are impossible, by layout.
    """
    ranks = counted(predicted[0].ranks, "rank")
    parts: list[RenderableType] = [
        Text(f"Memory of a rank at the peak of a step, predicted for {ranks}"),
        _table(predicted),
        *(Text(line) for line in _places(predicted)),
        *(Text(f"{layout} is left out: {why}") for layout, why in problems.items()),
    ]
    try:
        parts.append(Text(choose_layout(predicted, available).reason))
    except ValueError as error:
        parts.append(Text(str(error)))
    return Group(*parts)


def _table(predicted: Sequence[LayoutMemory]) -> Table:
    """Return a column for each layout."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("")
    for one in predicted:
        table.add_column(one.name.replace(" + ", "\n"), justify="right")
    for name, words in WORDS.items():
        sizes = [asdict(one.memory)[name] for one in predicted]
        if any(sizes):
            table.add_row(words, *map(size, sizes))
    table.add_row("peak", *(Text(size(one.memory.total), style="bold") for one in predicted))
    return table


def _places(predicted: Sequence[LayoutMemory]) -> list[str]:
    """Return where in the step the peaks are, a line for each place."""
    names: dict[str, list[str]] = {}
    for one in predicted:
        names.setdefault(one.place, []).append(one.name)
    if len(names) == 1:
        return [f"peak: {place}" for place in names]
    return [f"peak of {', '.join(of)}: {place}" for place, of in names.items()]
