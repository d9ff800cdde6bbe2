"""Rule for the gathers and reductions of sharded models (FSDP2)."""

from typing import Any

from ...figures.process_groups import Collective
from ...sharding.block_exchange import BACKWARD_GATHER, FORWARD_GATHER, REDUCTION, ShardedBlock
from ...sharding.late_gathers import GATHERS, describe_blocks, exposed_s
from ..evidence import Evidence, NamedCause

MIN_CALLS = 0.5  # of a kind of collective: then that collective belongs to the blocks
MAX_LISTED_BLOCKS = 8
_KINDS_OF = {
    "all-gather": GATHERS,
    "reduce-scatter": (REDUCTION,),
    "all-reduce": (REDUCTION,),  # between the replicas of shards
}


def sharded_exchange(e: Evidence, calls: Collective, figures: dict[str, Any]) -> NamedCause | None:
    """Return the cause if most calls of the costliest collective belong to sharded blocks.

    figures: Those of the collective, which the evidence has as well.
    """
    kinds = _KINDS_OF.get(calls.name)
    if e.sharded is None or kinds is None:
        return None
    blocks = e.sharded.blocks
    of_blocks = sum(one.count for block in blocks for one in block.calls if one.kind in kinds)
    if of_blocks < MIN_CALLS * calls.count / e.steps:
        return None
    found = {
        "forward_gathers_s": exposed_s(blocks, FORWARD_GATHER),
        "backward_gathers_s": exposed_s(blocks, BACKWARD_GATHER),
        "reductions_s": exposed_s(blocks, REDUCTION),
        "gathered_bytes": e.sharded.gathered_bytes,
        "free_bytes": e.sharded.free_bytes,
        "blocks": [_listed(block) for block in _most_exposed(blocks)],
    }
    return "sharded-exchange", describe_blocks(blocks), figures | found


def _most_exposed(blocks: list[ShardedBlock]) -> list[ShardedBlock]:
    return sorted(blocks, key=lambda block: -block.exposed_s())[:MAX_LISTED_BLOCKS]


def _listed(block: ShardedBlock) -> dict[str, Any]:
    late = {f"{one.kind.replace(' ', '_')}_late_s": one.late_s for one in block.calls}
    return {"name": block.name, "exposed_s": block.exposed_s(), **late}
