"""A sharded model as ``paceline diagnose`` sees it: its blocks, and the memory that was left."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ...record.ring.states import Memory, State
from ..records.read_record import Record
from .block_exchange import BlockCalls, ShardedBlock
from .late_gathers import GATHERS


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
        return [one for one in block.calls if one.kind in GATHERS]


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
