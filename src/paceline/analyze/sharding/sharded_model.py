"""A sharded model as ``paceline diagnose`` sees it: its blocks, and the memory that was left."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ...plurals import counted
from ...record.ring.states import Memory, State
from ..records.read_record import Record
from .block_exchange import BACKWARD_GATHER, FORWARD_GATHER, BlockCalls, ShardedBlock

# Which gathers of a sharded model come too late, and what would help, in words.

GATHERS = (FORWARD_GATHER, BACKWARD_GATHER)
PREFETCH = "prefetch further"
MORE_BLOCKS = "divide the model into more blocks"  # there is none to gather meanwhile
KEEP_GATHERED = "keep it gathered after the forward"
WHEN = {FORWARD_GATHER: "in the forward", BACKWARD_GATHER: "in the backward"}


def exposed_s(blocks: list[ShardedBlock], *kinds: str) -> float:
    """Return the exposed time per step of these kinds of calls; of all without a kind."""
    return sum(block.exposed_s(*kinds) for block in blocks)


def latest_gather(blocks: list[ShardedBlock]) -> tuple[ShardedBlock, BlockCalls] | None:
    """Return the block whose gathers have most exposed time each, and these gathers."""
    found = [(block, one) for block in blocks for one in block.calls if one.kind in GATHERS]
    late = max(found, key=lambda pair: pair[1].late_s, default=None)
    return late if late is not None and late[1].late_s > 0 else None


def describe_blocks(blocks: list[ShardedBlock]) -> str:
    """Return a sentence about exposed gathers and reductions, without full stop.

    It names the gather that comes latest, and what would help.
    """
    whole = 1e3 * exposed_s(blocks)
    text = (
        f"gathers and reductions of {counted(len(blocks), 'sharded block')} are exposed for "
        f"{whole:.3g} ms of a step"
    )
    if (late := latest_gather(blocks)) is None:
        return text
    block, calls = late
    earlier = PREFETCH if len(blocks) > 1 else MORE_BLOCKS
    helps = earlier if calls.kind == FORWARD_GATHER else f"{earlier}, or {KEEP_GATHERED}"
    return (
        f"{text}; the gather of {block.name} {WHEN[calls.kind]} comes {1e3 * calls.late_s:.3g} ms "
        f"late: {helps}"
    )


@dataclass(frozen=True)
class ShardedModel:
    """The sharded blocks of a run.

    Attributes:
        blocks: In the order of their first gather.
        free_bytes: Memory that each rank could have used in addition; None if unknown.
    """

    blocks: list[ShardedBlock]
    free_bytes: int | None

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all whole parameters, in the dtype in which they are gathered."""
        sizes = [[one.bytes for one in self.gathers(block)] for block in self.blocks]
        return round(sum(max(of_block, default=0.0) for of_block in sizes))

    @staticmethod
    def gathers(block: ShardedBlock) -> list[BlockCalls]:
        """Return the gathers of a block, in forward and in backward."""
        return [call for call in block.calls if call.kind in GATHERS]


def sharded_model(blocks: list[ShardedBlock], records: list[Record]) -> ShardedModel | None:
    """Return the sharded model of a run; None without blocks."""
    return ShardedModel(blocks, least_free_bytes(records)) if blocks else None


def least_free_bytes(records: list[Record]) -> int | None:
    """Return the memory that each rank could use in addition, when least was left.

    It is that of the rank's GPU if the record has one, otherwise an equal part of what was left to
    all ranks of the node. None if a rank has no sample.
    """
    ranks_of = Counter(record.host for record in records)
    found = []
    for record in records:
        rows = record.events_in(State.MEMORY)
        of_device = rows["amount"][rows["peer"] == Memory.DEVICE_AVAILABLE]
        of_host = rows["amount"][rows["peer"] == Memory.HOST_AVAILABLE]
        left = of_device if len(of_device) else of_host // ranks_of[record.host]
        if not len(left):
            return None
        found.append(int(np.min(left)))
    return min(found, default=None)
