"""The result of a rehearsal for the terminal and as JSON: ``paceline run --rehearse``."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...analyze.rehearsal.axis_traffic import AxisLinks, axis_links, axis_traffic, rank_traffic
from ...analyze.rehearsal.facts import (
    REHEARSED_STEPS,
    Failure,
    RankFacts,
    Rehearsal,
    groups_along,
    place_of,
)
from ...analyze.rehearsal.mismatches import find_mismatches
from ...cost.layout import crossing_line
from ...plurals import format_ranges, named_ranks
from ..numbers import counted, size

FORMAT, VERSION = "paceline-rehearsal", 1
MAX_SHOWN_HOSTS = 8
MAX_SHOWN_RANKS = 64  # of the placement
VALUES = (
    "Each got from the others what equal ranks would send: shapes, bytes and calls are those of "
    "the job, values are not."
)


def rehearsal_json(found: Rehearsal) -> dict[str, Any]:
    """Return the value of ``--json``."""
    request, failed = found.request, found.failed
    return {
        "format": FORMAT,
        "version": VERSION,
        "ranks": request.ranks,
        "layout": next((one.layout for one in found.ranks if one.layout), None),
        "axes": dict(found.axes),
        "hosts": [{"name": host.name, "ranks": host.ranks} for host in request.hosts],
        "failure": None
        if failed is None or failed.failure is None
        else {"rank": failed.rank, "step": failed.steps + 1, **asdict(failed.failure)},
        "mismatches": find_mismatches(found.ranks),
        "slow_links": _slow_links(found),
        "axes_per_step": [asdict(one) for one in axis_traffic(found.ranks)],
        "links": [asdict(one) for one in axis_links(found)],
        "rehearsed": [_rank_json(one, found) for one in found.ranks],
    }


def _rank_json(one: RankFacts, found: Rehearsal) -> dict[str, Any]:
    traffic = [
        {"axis": axis, "ranks": ranks, "op": op, "calls": calls, "bytes": amount}
        for (axis, ranks, op), (calls, amount) in rank_traffic(one).items()
    ]
    return {
        "rank": one.rank,
        "place": one.place,
        "host": found.request.host_of_rank[one.rank],
        "steps": one.steps,
        "samples_per_step": one.samples,
        "seconds": one.seconds,
        "memory_bytes": asdict(one.memory),
        "unknown_values": one.has_unknown,
        "collectives_per_step": traffic,
    }


def render(found: Rehearsal) -> Group:
    """Return the result as text for the terminal."""
    ran = named_ranks([one.rank for one in found.ranks])
    layout = next((one.layout for one in found.ranks if one.layout), "")
    of_layout = f", layout {layout}" if layout else ""
    parts: list[RenderableType] = [
        Text(f"Rehearsal of {counted(found.request.ranks, 'rank')}{of_layout}", style="bold"),
        Text(f"Ran on the CPU, one after the other, without network: {ran}. {VALUES}"),
    ]
    if found.request.shows_layout:
        parts += [Text(""), _hosts(found)]
    if any(one.measured_calls for one in found.ranks):
        parts += [Text(""), _traffic(found)]
    parts += [Text(line) for line in _slow_links(found)]
    if not found.request.shows_layout and any(one.steps for one in found.ranks):
        parts += [Text(""), _ranks(found)]
    parts += [Text(""), *(Text(line) for line in _result(found))]
    return Group(*parts)


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="",
        box=None,
        padding=(0, 2, 0, 0),
        show_edge=False,
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    return table


def _hosts(found: Rehearsal) -> Table:
    """Return a row for each rank, or for each host where there are many ranks."""
    request, axes = found.request, found.axes
    if request.ranks <= MAX_SHOWN_RANKS:
        names = [axis for axis, extent in axes if extent > 1]
        places = [place for host in request.hosts for place in _places(host.ranks, host.places)]
        known = ["on the host"] if any(places) else []
        table = _table("Placement", "rank", "host", *known, *names, left=2 + len(known))
        for rank, (name, place) in enumerate(zip(request.host_of_rank, places, strict=True)):
            at = place_of(rank, axes)
            known = [place] if any(places) else []
            table.add_row(str(rank), name, *known, *(str(at[axis]) for axis in names))
        return table
    table = _table("Placement", "host", "ranks", left=2)
    first = 0
    for number, host in enumerate(request.hosts):
        if number < MAX_SHOWN_HOSTS or number == len(request.hosts) - 1:
            table.add_row(host.name, format_ranges(list(range(first, first + host.ranks))))
        elif number == MAX_SHOWN_HOSTS:
            table.add_row("...", "")
        first += host.ranks
    return table


def _places(ranks: int, known: Sequence[str]) -> list[str]:
    return [known[i] if i < len(known) else "" for i in range(ranks)]


def _traffic(found: Rehearsal) -> Table:
    """Return a row for each axis and collective."""
    links = {one.axis: one for one in axis_links(found)}
    table = _table(
        "What a rank exchanges in a step (the second one)",
        *("axis", "collective", "group", "links", "calls", "bytes", "sent by a rank"),
        left=4,
    )
    for one in axis_traffic(found.ranks):
        where = _where(links.get(one.axis), found)
        size_text = f"{one.size} ranks" if one.size > 1 else "1 rank"
        amount = size(one.bytes)
        if one.others:
            least = size(min(one.others.values()))
            amount = amount if least == amount else f"{least} to {amount}"
        row = (one.axis, one.collective, size_text, where, f"{one.calls:,}", amount, size(one.sent))
        table.add_row(*row)
    return table


def _where(links: AxisLinks | None, found: Rehearsal) -> str:
    """Return whether the groups of an axis cross hosts."""
    if links is None or len(found.request.hosts) == 1:
        return "in a host"
    if not links.crossing:
        return "in a host"
    if links.crossing == links.groups:
        return "between hosts"
    return f"{links.crossing} of {links.groups} groups between hosts"


def _ranks(found: Rehearsal) -> Table:
    """Return the memory of each rank that ran."""
    names = [axis for axis, extent in found.axes if extent > 1]
    table = _table(
        "Memory of the ranks that ran",
        *("rank", *names, "parameters", "gradients", "optimizer states", "peak of the process"),
        *("samples per step", "seconds"),
    )
    for one in (one for one in found.ranks if one.steps):
        memory = one.memory
        sizes = (memory.parameters, memory.gradients, memory.optimizer_states, memory.process_peak)
        at = one.place
        table.add_row(
            *(str(one.rank), *(str(at.get(name, "")) for name in names), *map(size, sizes)),
            *(f"{one.samples:,}", f"{one.seconds:.1f}"),
        )
    return table


def _slow_links(found: Rehearsal) -> list[str]:
    """Return a line for each axis whose ranks exchange in each layer and are on several hosts."""
    nodes = found.request.host_of_rank
    lines = (
        crossing_line(axis, groups_along(axis, found.axes), nodes)
        for axis, extent in found.axes
        if extent > 1
    )
    return [line for line in lines if line]


def _result(found: Rehearsal) -> list[str]:
    """Return whether ranks would fail, and why."""
    failed = found.failed
    if failed is not None and failed.failure is not None:
        return _failure(failed, failed.failure)
    mismatches = find_mismatches(found.ranks)
    if mismatches:
        return [
            "The ranks would wait for each other, or fail, because they call different "
            "collectives:",
            *mismatches,
            "HINT: all ranks of a group must call the same collectives in the same order",
        ]
    short = [one for one in found.ranks if one.steps < REHEARSED_STEPS]
    if short:
        return [
            f"The script ended after {counted(short[0].steps, 'optimizer step')} of "
            f"{REHEARSED_STEPS} without an error. HINT: more batches or epochs show a whole step"
        ]
    return ["No error in two steps, and the ranks that ran call the same collectives."]


def _failure(failed: RankFacts, failure: Failure) -> list[str]:
    step = f"in step {failed.steps + 1}" if failed.steps else "before its first optimizer step"
    at = f" at {failure.line}," if failure.line else ""
    who = named_ranks([failed.rank], places={failed.rank: failed.place} if failed.place else None)
    if failure.is_limit:
        return [f"{who} can't be rehearsed further{at} {step}: {failure.text}"]
    lines = [f"{who} would fail{at} {step}: {failure.text}"]
    if failed.has_unknown:
        lines.append(
            "Before, it got values in place of those that another rank would have sent: an error "
            "that depends on values may come from them"
        )
    return lines
