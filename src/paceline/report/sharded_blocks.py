"""Gathers and reductions of sharded models, and exchange of a tensor axis by layer, for the
terminal and the page."""

from ..analyze.diagnosis.evidence import MIN_SHARE
from ..analyze.figures.report import Report
from ..analyze.sharding.block_exchange import KINDS, LAYER_KINDS, ShardedBlock
from ..analyze.sharding.sharded_model import describe_blocks, exposed_s
from .numbers import duration, size

MAX_LISTED_BLOCKS = 8


LAYER_HEADINGS = ("layer of the tensor axis", "size", *LAYER_KINDS, "exposed per step")


def by_exposed_time(blocks: list[ShardedBlock]) -> list[ShardedBlock]:
    """Return blocks or layers, those with most exposed time first."""
    return sorted(blocks, key=lambda block: -block.exposed_s())


def block_cells(block: ShardedBlock, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """Return the texts of a table row: name, size, calls of each kind, exposed time of a step.

    Calls: their number in a step, and how late each one comes.
    """
    most = max((one.bytes for one in block.calls), default=0.0)
    calls = {one.kind: one for one in block.calls}
    cells = [block.name, size(most)]
    for kind in kinds:
        one = calls.get(kind)
        cells.append(f"{one.count:.3g} x {duration(one.late_s)}" if one is not None else "-")
    return [*cells, duration(block.exposed_s())]


def exposed_blocks(report: Report) -> list[str]:
    """Return a sentence if the gathers and reductions take a relevant part of the steps."""
    times = report.step_times
    if times is None or exposed_s(report.blocks) < MIN_SHARE * times.median_s:
        return []
    text = describe_blocks(report.blocks)
    return [f"{text[0].upper()}{text[1:]}"]
