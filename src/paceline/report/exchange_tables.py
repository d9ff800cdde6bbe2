"""What ranks exchange: axes of the mesh, process groups, sharded blocks, layers, halos."""

from collections.abc import Iterable

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
from .verdict import capitalized

MAX_LISTED, MAX_LISTED_ON_PAGE = 8, 40  # blocks, layers, halos or process groups
_SHARES = ("wait", "transfer", "hidden")
_SHARE_COLUMNS = ("wait|wait", "transfer|transfer", "hidden|hidden")
_EXPOSED = "exposed per step|exposed communication"


def exchange_sections(report: Report, *, is_page: bool) -> Iterable[doc.Section]:
    """Return the tables of axes, layers, halos, process groups and sharded blocks."""
    most = MAX_LISTED_ON_PAGE if is_page else MAX_LISTED
    tables: list[tuple[doc.Table | None, doc.Text]] = [
        (
            _axes_table(report),
            "Shares of all ranks' time: the waits and transfers of the axes add up to those of the "
            "ranks.",
        ),
        (
            _layers_table(report, most),
            "Calls in a step of a mean rank, and the exposed time of each.",
        ),
        (_halos_table(report, most), ""),
        (
            _groups_table(report, most),
            doc.text("Wait and transfer are [exposed communication]; hidden is [overlap|hidden]."),
        ),
    ]
    blocks: list[doc.Block] = []
    for table, note in tables:
        if table is not None:
            blocks += [doc.BLANK] if blocks else []
            blocks += [table, *([doc.Line(note, doc.MUTED, doc.PAGE)] if note else [])]
    heading = doc.on_page("Collectives", term="collective")
    yield doc.Section("collectives", "Collectives", blocks, heading)
    if (table := _blocks_table(report, most)) is not None:
        note = (
            "Each column of gathers and reductions has their number in a step, and how late each "
            "of them comes."
        )
        sharded: list[doc.Block] = [
            *doc.lines(exposed_blocks(report)),
            table,
            doc.Line(note, doc.MUTED, doc.PAGE),
        ]
        heading = doc.on_page("Sharded blocks", term="sharded block")
        yield doc.Section("blocks", "Sharded blocks", sharded, heading)


def _axes_table(report: Report) -> doc.Table | None:
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
    columns = doc.columns(
        *("axis|mesh axis", "ranks|rank", "groups", *_SHARE_COLUMNS, "load balance|load_balance"),
        *("wait eff.", "transfer eff.", "efficiency", "bytes a step"),
    )
    return doc.Table(columns, rows, name="axes")


def _blocks_table(report: Report, most: int) -> doc.Table | None:
    """Return gathers and reductions of the sharded blocks with most exposed time, or None."""
    columns = doc.columns(
        *("sharded block|sharded block", "size|bytes", "late in forward|late"),
        *("late in backward|late", "late reductions|late", _EXPOSED),
    )
    return _modules(report.blocks, columns, KINDS, "block", most)


def _layers_table(report: Report, most: int) -> doc.Table | None:
    """Return the exchange of the layers of a tensor axis with most exposed time, or None."""
    columns = doc.columns("layer of the tensor axis", "size", *LAYER_KINDS, _EXPOSED)
    return _modules(report.layers, columns, LAYER_KINDS, "layer", most)


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
        calls = {call.kind: call for call in block.calls}
        cells = [block.name, size(max((call.bytes for call in block.calls), default=0.0))]
        for kind in kinds:
            call = calls.get(kind)
            cells.append(f"{call.count:.3g} x {duration(call.late_s)}" if call is not None else "-")
        rows.append(doc.Row([*cells, duration(block.exposed_s())]))
    if more := blocks[most:]:
        rest = duration(sum(block.exposed_s() for block in more))
        name = f"{counted(len(more), f'more {word}')} (--json)"
        rows.append(doc.Row([name, *[""] * (len(columns) - 2), rest]))
    return doc.Table(columns, rows, name=f"{word}s")


def _halos_table(report: Report, most: int) -> doc.Table | None:
    """Return the layers that wait longest for halos, in layouts that divide samples; or None."""
    if not report.halos:
        return None
    rows = [
        doc.Row([layer.name, str(layer.exchanges), size(layer.bytes), percent(layer.exposed)])
        for layer in report.halos[:most]
    ]
    if more := report.halos[most:]:
        rest = percent(sum(layer.exposed for layer in more))
        rows.append(doc.Row([f"{counted(len(more), 'more layer')} (--json)", "", "", rest]))
    columns = doc.columns("halos of", "exchanges", "received, all ranks", "exposed")
    return doc.Table(columns, rows, name="halos")


def _groups_table(report: Report, most: int) -> doc.Table | None:
    """Return the collectives of the process groups with most wait and transfer time, or None."""
    if not report.groups:
        return None
    order = sorted(enumerate(report.groups), key=lambda pair: -(pair[1].wait + pair[1].transfer))
    rows = []
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
        *doc.columns("process group|group", "ranks|rank"),
        *doc.columns("collective|collective", "count|count", "bytes each|bytes", *_SHARE_COLUMNS),
        doc.Column("algbw GB/s", term="algbw", where=doc.PAGE),
        doc.Column("busbw GB/s", term="busbw"),
    ]
    return doc.Table(columns, rows)


def _rate(value: float | None) -> str:
    return doc.NOT_KNOWN if value is None else f"{value:.3g}"


def exposed_blocks(report: Report) -> list[str]:
    """Return a sentence if the gathers and reductions take a relevant part of the steps."""
    times = report.step_times
    if times is None or exposed_s(report.blocks) < MIN_SHARE * times.median_s:
        return []
    return [capitalized(describe_blocks(report.blocks))]
