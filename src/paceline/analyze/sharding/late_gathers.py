"""Which gathers of a sharded model come too late, and what would help, in words."""

from ...plurals import counted
from .block_exchange import BACKWARD_GATHER, FORWARD_GATHER, BlockCalls, ShardedBlock

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
