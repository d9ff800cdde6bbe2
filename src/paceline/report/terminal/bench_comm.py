"""Table of ``paceline bench comm``: collectives by size, in the layout of nccl-tests."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...cost.machine.machine_file import AtSize, Collective
from ...cost.machine.units import format_value, size
from ...plurals import counted


def render(
    found: Sequence[Collective], copies: Sequence[AtSize], notes: Sequence[str]
) -> RenderableType:
    """Return a table with a row for each size and backend.

    found: Results of each backend, gloo first: other times are given as shares of its times.
    copies: Times of a copy in memory for the same sizes.
    The spread is the distance between the quartiles, as a share of the median.
    """
    first = found[0]
    where = (
        f"on {first.hosts[0]}"
        if len(first.hosts) == 1
        else f"on {counted(len(first.hosts), 'node')}"
    )
    table = Table(
        title=f"{first.operation} of {counted(first.ranks, 'rank')} {where}",
        box=None,
        pad_edge=False,
        title_justify="left",
    )
    for heading in ("size", "backend", "time", "spread", "algbw", "busbw", "of gloo's", "copies"):
        left = heading == "backend"
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for at, one in enumerate(first.sizes):
        for collective in found:
            row = _row(collective, at, first, copies)
            table.add_row(size(one.bytes) if collective is first else "", *row)
    latencies = ", ".join(
        f"{one.backend} {format_value(one.latency.median, 's')}" for one in found if one.latency
    )
    said = [Text(f"Latency of 8 bytes: {latencies}.")]
    return Group(table, *said, *(Text(note, style="bright_black") for note in notes))


def _row(
    collective: Collective, at: int, first: Collective, copies: Sequence[AtSize]
) -> list[str | Text]:
    one = collective.sizes[at]
    rate, bus = one.algbw, collective.busbw(one)
    seconds = one.seconds
    share = seconds.median / first.sizes[at].seconds.median
    copy = copies[at].seconds.median if at < len(copies) else 0.0
    shown: str | Text = "" if collective is first else f"{share:.2g}"
    if collective is not first and share < 1:
        shown = Text(f"{share:.2g}", style="green")
    return [
        collective.backend,
        format_value(seconds.median, "s"),
        f"{100 * seconds.spread / seconds.median:.0f} %" if seconds.median else "",
        format_value(rate.median, "B/s") if rate else "-",
        format_value(bus.median, "B/s") if bus else "-",
        shown,
        f"{seconds.median / copy:.3g}" if copy else "",
    ]


def as_json(
    found: Sequence[Collective], copies: Sequence[AtSize], notes: Sequence[str]
) -> dict[str, Any]:
    """Return median and quartiles for each backend and size, in seconds and bytes/s, as JSON."""

    def figure(one: Any) -> dict[str, float] | None:
        return None if one is None else {"median": one.median, "low": one.low, "high": one.high}

    return {
        "format": "paceline-comm",
        "version": 1,
        "notes": list(notes),
        "collectives": [
            {
                "operation": one.operation,
                "backend": one.backend,
                "group": one.group,
                "ranks": one.ranks,
                "hosts": list(one.hosts),
                "latency": figure(one.latency),
                "sizes": [
                    {
                        "bytes": at.bytes,
                        "seconds": figure(at.seconds),
                        "algbw": figure(at.algbw),
                        "busbw": figure(one.busbw(at)),
                    }
                    for at in one.sizes
                ],
            }
            for one in found
        ],
        "copies": [{"bytes": at.bytes, "seconds": figure(at.seconds)} for at in copies],
    }
