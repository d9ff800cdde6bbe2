"""Predict the savings of remedies for the gathers and reductions of sharded models (FSDP2)."""

from typing import Any

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.evidence import MIN_SHARE, Evidence
from ..analyze.diagnosis.ladder import Interval
from .saving import FORMULA, RECORD, TRIED, Saving

PREFETCHED_BLOCKS = 2  # one more than FSDP2 prefetches by itself
# Largest share of the free memory that a proposed change may use: samples of it are a second apart.
MAX_USED_SHARE = 0.8
# Bytes of a rank without sharding, relative to the parameters, with Adam in their dtype:
# parameters, gradients, two states, and DDP's buckets.
UNSHARDED_FACTOR = 5
SMALL_BLOCK_BYTES = 1 << 20  # latency takes most of the gather of a smaller one
MIN_SMALL_BLOCKS = 4
LARGE_BLOCK_SHARE = 0.5  # of all blocks: the gather of a larger one cannot overlap with others


def _part(cause: Cause, *names: str) -> float:
    """Return which part of the exposed time the named figures of the evidence have."""
    kinds = ("forward_gathers_s", "backward_gathers_s", "reductions_s")
    seconds = {name: float(cause.evidence.get(name, 0.0)) for name in kinds}
    whole = sum(seconds.values())
    return sum(seconds[name] for name in names) / whole if whole else 0.0


def _scaled(cause: Cause, value: Any, part: float) -> Saving:
    low, high = cause.interval
    return Saving(value, Interval(part * cause.share, part * low, part * high), RECORD)


def prefetch_blocks(e: Evidence, cause: Cause) -> Saving | None:
    """Propose prefetch if gathers are exposed; what it saves is measured."""
    gathers = _part(cause, "forward_gathers_s", "backward_gathers_s")
    if gathers * cause.share < MIN_SHARE / 2:
        return None
    return Saving(PREFETCHED_BLOCKS, None, TRIED)


def keep_gathered(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving without gathers in the backward, if memory for the parameters is free."""
    part = _part(cause, "backward_gathers_s")
    if not part or not _fits(e, _unsharded_part(e) * float(cause.evidence["gathered_bytes"])):
        return None
    return _scaled(cause, True, part)


def other_blocks(e: Evidence, cause: Cause) -> Saving | None:
    """Propose larger blocks if they are small, or smaller ones if one has most parameters."""
    if e.sharded is None:
        return None
    sizes = [max((c.bytes for c in e.sharded.gathers(b)), default=0.0) for b in e.sharded.blocks]
    sizes = [size for size in sizes if size]
    if not sizes:
        return None
    many = len(sizes) >= MIN_SMALL_BLOCKS
    if many and sum(sizes) / len(sizes) < SMALL_BLOCK_BYTES:
        edit = (
            "call fully_shard for modules around several of them (blocks= of world.distribute): "
            f"a gather has {sum(sizes) / len(sizes) / 1e3:.3g} kB on average, and latency dominates"
        )
    elif len(sizes) == 1 or max(sizes) > LARGE_BLOCK_SHARE * sum(sizes):
        edit = (
            "call fully_shard for modules inside of the largest block (blocks= of "
            f"world.distribute): it has {100 * max(sizes) / sum(sizes):.0f} % of the parameters, "
            "and its gather overlaps with nothing"
        )
    else:
        return None
    return Saving(edit, Interval(cause.share / 2, 0.0, cause.share), RECORD)


def data_parallel(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving without sharding, if the memory of the ranks suffices for it.

    Gathers disappear. Gradients are all-reduced, which moves twice as much as their reductions and
    overlaps with the backward.
    """
    gathers = _part(cause, "forward_gathers_s", "backward_gathers_s") * cause.share
    size = sum(e.first_facts.get("parameters", {}).values())
    size = max(size, cause.evidence.get("gathered_bytes", 0))
    more = _unsharded_part(e) * UNSHARDED_FACTOR * size
    if not size or e.sharded is None or not _fits(e, more):
        return None
    free = e.sharded.free_bytes or 0
    edit = (
        'world.distribute(layout="data"), or DistributedDataParallel instead of fully_shard: a '
        f"rank needs about {more / 1e9:.2g} GB more with Adam, and had {free / 1e9:.2g} GB free"
    )
    return Saving(edit, Interval(gathers / 2, 0.0, gathers), FORMULA)


def _unsharded_part(e: Evidence) -> float:
    """Return the part of the model that a rank does not hold, if all ranks share it."""
    return 1 - 1 / e.report.size


def _fits(e: Evidence, more: float) -> bool:
    """Return whether memory is known to suffice for this many bytes more on each rank."""
    if e.sharded is None or e.sharded.free_bytes is None:
        return False
    return more <= MAX_USED_SHARE * e.sharded.free_bytes
