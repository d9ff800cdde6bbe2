"""Tables of what is exchanged: axes of the mesh, process groups, sharded blocks, layers, halos."""

from ..analyze.diagnosis.evidence import MIN_SHARE
from ..analyze.figures.report import Report
from ..analyze.figures.sharded_blocks import (
    KINDS,
    LAYER_KINDS,
    ShardedBlock,
    describe_blocks,
    exposed_s,
)
from . import document as doc
from .definitions import DEFINITIONS
from .numbers import counted, duration, percent, size

MAX_LISTED, MAX_LISTED_ON_PAGE = 8, 40  # blocks, layers, halos or process groups
_SHARES = ("wait", "transfer", "hidden")
_LATE = ("late in forward", "late in backward", "late reductions")


def axes_table(report: Report) -> doc.Table | None:
    """Return the axes of the mesh with what each costs; None without other axes than data."""
    if not report.axes:
        return None
    rows = []
    for axis in report.axes:
        shares = (axis.wait, axis.transfer, axis.hidden, axis.load_balance)
        efficiencies = (axis.wait_efficiency, axis.transfer_efficiency, axis.efficiency)
        sent = "-" if axis.bytes_per_step is None else size(axis.bytes_per_step)
        figures = [*map(percent, (*shares, *efficiencies)), sent]
        rows.append(doc.Row([axis.name, str(axis.extent), str(axis.groups), *figures]))
    columns = [
        doc.Column("axis", right=False, term="mesh axis"),
        doc.Column("ranks", term="rank"),
        doc.Column("groups"),
        *(doc.Column(name, term=name) for name in _SHARES),
        doc.Column("load balance", term="load_balance"),
        *map(doc.Column, ("wait eff.", "transfer eff.", "efficiency", "bytes a step")),
    ]
    return doc.Table(columns, rows, name="axes")


def blocks_table(report: Report, *, is_page: bool) -> doc.Table | None:
    """Return gathers and reductions of the sharded blocks with most exposed time, or None."""
    columns = [
        doc.Column("sharded block", right=False, term="sharded block"),
        doc.Column("size", term="bytes"),
        *(doc.Column(name, term="late") for name in _LATE),
        doc.Column("exposed per step", term="exposed communication"),
    ]
    return _modules(report.blocks, columns, KINDS, "block", _most(is_page))


def layers_table(report: Report, *, is_page: bool) -> doc.Table | None:
    """Return the exchange of the layers of a tensor axis with most exposed time, or None."""
    columns = [
        doc.Column("layer of the tensor axis", right=False),
        *map(doc.Column, ("size", *LAYER_KINDS)),
        doc.Column("exposed per step", term="exposed communication"),
    ]
    return _modules(report.layers, columns, LAYER_KINDS, "layer", _most(is_page))


def _modules(
    found: list[ShardedBlock],
    columns: list[doc.Column],
    kinds: tuple[str, ...],
    word: str,
    most: int,
) -> doc.Table | None:
    """Return name, size, calls of each kind and exposed time of a step of blocks or layers.

    Calls: their number in a step, and how late each one comes.
    """
    if not found:
        return None
    blocks = sorted(found, key=lambda block: -block.exposed_s())
    rows = []
    for block in blocks[:most]:
        calls = {one.kind: one for one in block.calls}
        cells = [block.name, size(max((one.bytes for one in block.calls), default=0.0))]
        for kind in kinds:
            one = calls.get(kind)
            cells.append(f"{one.count:.3g} x {duration(one.late_s)}" if one is not None else "-")
        rows.append(doc.Row([*cells, duration(block.exposed_s())]))
    if more := blocks[most:]:
        rest = duration(sum(block.exposed_s() for block in more))
        name = f"{counted(len(more), f'more {word}')} (--json)"
        rows.append(doc.Row([name, *[""] * (len(columns) - 2), rest]))
    return doc.Table(columns, rows, name=f"{word}s")


def halos_table(report: Report, *, is_page: bool) -> doc.Table | None:
    """Return the layers that wait longest for halos, in layouts that divide samples; or None."""
    if not report.halos:
        return None
    most = _most(is_page)
    rows = [
        doc.Row([one.name, str(one.exchanges), size(one.bytes), percent(one.exposed)])
        for one in report.halos[:most]
    ]
    if more := report.halos[most:]:
        rest = percent(sum(one.exposed for one in more))
        rows.append(doc.Row([f"{counted(len(more), 'more layer')} (--json)", "", "", rest]))
    headings = ("exchanges", "received, all ranks", "exposed")
    columns = [doc.Column("halos of", right=False), *map(doc.Column, headings)]
    return doc.Table(columns, rows, name="halos")


def groups_table(report: Report, *, is_page: bool) -> doc.Table | None:
    """Return the collectives of the process groups with most wait and transfer time, or None."""
    if not report.groups:
        return None
    order = sorted(enumerate(report.groups), key=lambda pair: -(pair[1].wait + pair[1].transfer))
    most, rows = _most(is_page), []
    for at, group in order[:most]:
        for number, kind in enumerate(group.collectives):
            path = f"groups.{at}.collectives.{number}"
            each = size(kind.bytes / kind.count) if kind.count else doc.NOT_KNOWN
            values = {
                "count": str(kind.count),
                "": each,
                **{name: percent(getattr(kind, name)) for name in _SHARES},
                **{name: _rate(getattr(kind, name)) for name in ("algbw", "busbw")},
            }
            term = kind.name if kind.name in DEFINITIONS else ""
            cells = [
                doc.Part(text, figure=f"{path}.{name}" if name else "")
                for name, text in values.items()
            ]
            name = doc.Part(kind.name, term=term)
            rows.append(doc.Row([group.name, str(group.size), name, *cells]))
    if more := [group for _, group in order[most:]]:
        members = sum(len(group.ranks) for group in more)
        means = (
            sum(getattr(group, name) * len(group.ranks) for group in more) / max(members, 1)
            for name in _SHARES
        )
        others = f"{counted(len(more), 'more group')} (--json)"
        rows.append(
            doc.Row([others, "", "mean of their ranks", "", "", *map(percent, means), "", ""])
        )
    columns = [
        doc.Column("process group", right=False, term="group"),
        doc.Column("ranks", term="rank"),
        doc.Column("collective", right=False, term="collective"),
        doc.Column("count", term="count"),
        doc.Column("bytes each", term="bytes"),
        *(doc.Column(name, term=name) for name in _SHARES),
        doc.Column("algbw GB/s", term="algbw", where=doc.PAGE),
        doc.Column("busbw GB/s", term="busbw"),
    ]
    return doc.Table(columns, rows)


def _rate(value: float | None) -> str:
    return doc.NOT_KNOWN if value is None else f"{value:.3g}"


def _most(is_page: bool) -> int:
    return MAX_LISTED_ON_PAGE if is_page else MAX_LISTED


def exposed_blocks(report: Report) -> list[str]:
    """Return a sentence if the gathers and reductions take a relevant part of the steps."""
    times = report.step_times
    if times is None or exposed_s(report.blocks) < MIN_SHARE * times.median_s:
        return []
    text = describe_blocks(report.blocks)
    return [f"{text[0].upper()}{text[1:]}"]
