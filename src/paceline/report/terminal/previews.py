"""What ``paceline run --rehearse`` and ``--show-memory`` print, in the terminal and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

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
from ...cost.layout import Layout, crossing_line
from ...cost.layout_memory import WORDS, LayoutMemory, choose_layout
from ...plurals import format_ranges, named_ranks
from .. import document as doc
from ..numbers import counted, size

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
        "format": "paceline-rehearsal",
        "version": 1,
        "ranks": request.ranks,
        "layout": next((facts.layout for facts in found.ranks if facts.layout), None),
        "axes": dict(found.axes),
        "hosts": [{"name": host.name, "ranks": host.ranks} for host in request.hosts],
        "failure": None
        if failed is None or failed.failure is None
        else {"rank": failed.rank, "step": failed.steps + 1, **asdict(failed.failure)},
        "mismatches": find_mismatches(found.ranks),
        "slow_links": _slow_links(found),
        "axes_per_step": [asdict(traffic) for traffic in axis_traffic(found.ranks)],
        "links": [asdict(link) for link in axis_links(found)],
        "rehearsed": [_rank_json(facts, found) for facts in found.ranks],
    }


def _rank_json(facts: RankFacts, found: Rehearsal) -> dict[str, Any]:
    traffic = [
        {"axis": axis, "ranks": ranks, "op": op, "calls": calls, "bytes": amount}
        for (axis, ranks, op), (calls, amount) in rank_traffic(facts).items()
    ]
    return {
        "rank": facts.rank,
        "place": facts.place,
        "host": found.request.host_of_rank[facts.rank],
        "steps": facts.steps,
        "samples_per_step": facts.samples,
        "seconds": facts.seconds,
        "memory_bytes": asdict(facts.memory),
        "unknown_values": facts.has_unknown,
        "collectives_per_step": traffic,
    }


def rehearsal_blocks(found: Rehearsal) -> list[doc.Block]:
    """Return the result for the terminal."""
    ran = named_ranks([facts.rank for facts in found.ranks])
    layout = next((facts.layout for facts in found.ranks if facts.layout), "")
    of_layout = f", layout {layout}" if layout else ""
    ranks = counted(found.request.ranks, "rank")
    blocks: list[doc.Block] = [
        doc.Heading(f"Rehearsal of {ranks}{of_layout}"),
        doc.Line(f"Ran on the CPU, one after the other, without network: {ran}. {VALUES}"),
    ]
    if found.request.shows_layout:
        blocks += [doc.BLANK, doc.Line("Placement"), _placement(found)]
    if any(facts.measured_calls for facts in found.ranks):
        exchanged = doc.Line("What a rank exchanges in a step (the second one)")
        blocks += [doc.BLANK, exchanged, _traffic(found)]
    blocks += map(doc.Line, _slow_links(found))
    if not found.request.shows_layout and any(facts.steps for facts in found.ranks):
        blocks += [doc.BLANK, doc.Line("Memory of the ranks that ran"), _memory_of_ranks(found)]
    return [*blocks, doc.BLANK, *map(doc.Line, _result(found))]


def _placement(found: Rehearsal) -> doc.Table:
    """Return a row for each rank, or for each host where there are many ranks."""
    request, axes = found.request, found.axes
    rows = []
    if request.ranks > MAX_SHOWN_RANKS:
        first = 0
        for number, host in enumerate(request.hosts):
            if number < MAX_SHOWN_HOSTS or number == len(request.hosts) - 1:
                ranks = format_ranges(list(range(first, first + host.ranks)))
                rows.append(doc.Row([host.name, ranks]))
            elif number == MAX_SHOWN_HOSTS:
                rows.append(doc.Row(["...", ""]))
            first += host.ranks
        return doc.Table(doc.columns("host", "ranks", left=2), rows, is_breakable=True)
    names = [axis for axis, extent in axes if extent > 1]
    places = [
        host.places[i] if i < len(host.places) else ""
        for host in request.hosts
        for i in range(host.ranks)
    ]
    has_places = any(places)
    for rank, (host_name, place) in enumerate(zip(request.host_of_rank, places, strict=True)):
        at = place_of(rank, axes)
        cells = [str(rank), host_name, *[place] * has_places, *(str(at[axis]) for axis in names)]
        rows.append(doc.Row(cells))
    headings = ("rank", "host", *["on the host"] * has_places, *names)
    return doc.Table(doc.columns(*headings, left=2 + has_places), rows, is_breakable=True)


def _traffic(found: Rehearsal) -> doc.Table:
    """Return a row for each axis and collective."""
    links = {link.axis: link for link in axis_links(found)}
    rows = []
    for traffic in axis_traffic(found.ranks):
        largest = size(traffic.bytes)
        if traffic.others:
            least = size(min(traffic.others.values()))
            largest = largest if least == largest else f"{least} to {largest}"
        cells = [
            *(traffic.axis, traffic.collective, counted(traffic.size, "rank")),
            *(_where(links.get(traffic.axis), found), f"{traffic.calls:,}"),
            *(largest, size(traffic.sent)),
        ]
        rows.append(doc.Row(cells))
    headings = ("axis", "collective", "group", "links", "calls", "bytes", "sent by a rank")
    return doc.Table(doc.columns(*headings, left=4), rows, is_breakable=True)


def _where(links: AxisLinks | None, found: Rehearsal) -> str:
    """Return whether the groups of an axis cross hosts."""
    if links is None or len(found.request.hosts) == 1 or not links.crossing:
        return "in a host"
    if links.crossing == links.groups:
        return "between hosts"
    return f"{links.crossing} of {links.groups} groups between hosts"


def _memory_of_ranks(found: Rehearsal) -> doc.Table:
    """Return the memory of each rank that ran."""
    names = [axis for axis, extent in found.axes if extent > 1]
    rows = []
    for facts in (facts for facts in found.ranks if facts.steps):
        memory = facts.memory
        sizes = (memory.parameters, memory.gradients, memory.optimizer_states, memory.process_peak)
        place = (str(facts.place.get(name, "")) for name in names)
        end = (f"{facts.samples:,}", f"{facts.seconds:.1f}")
        rows.append(doc.Row([str(facts.rank), *place, *map(size, sizes), *end]))
    headings = ("parameters", "gradients", "optimizer states", "peak of the process")
    columns = doc.columns("rank", *names, *headings, "samples per step", "seconds")
    return doc.Table(columns, rows, is_breakable=True)


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
    short = [facts for facts in found.ranks if facts.steps < REHEARSED_STEPS]
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


def memory_json(predicted: Sequence[LayoutMemory], available: int) -> dict[str, Any]:
    """Return the predictions as the value of ``--json``.

    Args:
        available: Bytes that a rank of this node may take.
    """
    rows = [
        {
            "layout": layout.axes,
            "recompute": layout.layout.recompute,
            "peak_bytes": layout.memory.total,
            **{f"{name}_bytes": value for name, value in asdict(layout.memory).items()},
            "phase": layout.phase,
            "module": layout.module,
            "line": layout.line or None,
            "fits": layout.memory.total <= available,
        }
        for layout in predicted
    ]
    return {
        "format": "paceline-memory",
        "version": 1,
        "ranks": predicted[0].ranks,
        "available_bytes": available,
        "layouts": rows,
    }


def memory_blocks(
    predicted: Sequence[LayoutMemory], available: int, problems: Mapping[Layout, str]
) -> list[doc.Block]:
    """Return the predictions for the terminal.

    problems: Why layouts are impossible, by layout.
    """
    ranks = counted(predicted[0].ranks, "rank")
    try:
        chosen = choose_layout(predicted, available).reason
    except ValueError as error:
        chosen = str(error)
    return [
        doc.Line(f"Memory of a rank at the peak of a step, predicted for {ranks}"),
        _memory_of_layouts(predicted),
        *map(doc.Line, _peaks(predicted)),
        *(doc.Line(f"{layout} is left out: {why}") for layout, why in problems.items()),
        doc.Line(chosen),
    ]


def _memory_of_layouts(predicted: Sequence[LayoutMemory]) -> doc.Table:
    """Return a column for each layout."""
    rows = []
    for name, words in WORDS.items():
        sizes = [asdict(layout.memory)[name] for layout in predicted]
        if any(sizes):
            rows.append(doc.Row([words, *map(size, sizes)]))
    peaks = (doc.Part(size(layout.memory.total), doc.STRONG) for layout in predicted)
    rows.append(doc.Row(["peak", *peaks]))
    names = (layout.name.replace(" + ", "\n") for layout in predicted)
    return doc.Table(doc.columns("", *names), rows, is_dense=True, is_breakable=True)


def _peaks(predicted: Sequence[LayoutMemory]) -> list[str]:
    """Return where in the step the peaks are, a line for each place."""
    names: dict[str, list[str]] = {}
    for layout in predicted:
        names.setdefault(layout.place, []).append(layout.name)
    if len(names) == 1:
        return [f"peak: {place}" for place in names]
    return [f"peak of {', '.join(layouts)}: {place}" for place, layouts in names.items()]
