"""Predict the savings of remedies of models in parts: shards (FSDP2), divided layers, pipelines."""

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.evidence import MIN_SHARE, Evidence
from ..analyze.diagnosis.rungs import Interval
from ..analyze.figures.pipeline import PipelineFigures
from ..cost.pipeline import idle_share
from .saving import FORMULA, RECORD, TRIED, Saving, scaled

PREFETCHED_BLOCKS = 2  # one more than FSDP2 prefetches by itself
# Largest share of the free memory that a proposed change may use: samples of it are a second apart.
MAX_USED_SHARE = 0.8
# Bytes of a rank without sharding, relative to the parameters, with Adam in their dtype:
# parameters, gradients, two states, and DDP's buckets.
UNSHARDED_FACTOR = 5
SMALL_BLOCK_BYTES = 1 << 20  # latency takes most of the gather of a smaller one
MIN_SMALL_BLOCKS = 4
LARGE_BLOCK_SHARE = 0.5  # of all blocks: the gather of a larger one cannot overlap with others
DATA = "data"  # axis of the mesh whose ranks train different samples
TENSOR = "tensor"
ZERO_BUBBLE = "zero-bubble"


def _part(cause: Cause, *names: str) -> float:
    """Return which part of the exposed time the named figures of the evidence have."""
    kinds = ("forward_gathers_s", "backward_gathers_s", "reductions_s")
    seconds = {name: float(cause.evidence.get(name, 0.0)) for name in kinds}
    whole = sum(seconds.values())
    return sum(seconds[name] for name in names) / whole if whole else 0.0


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
    return scaled(cause, part, RECORD)


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


def smaller_axis(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving with the next smaller number of ranks on the tensor axis.

    The bytes that cross a link are those of an all-reduce: 2 (p - 1) / p of the tensor. An axis on
    several nodes gets the ranks of one node.
    """
    extent, hosts = int(cause.evidence.get("extent", 2)), int(cause.evidence.get("hosts", 1))
    if hosts > 1 and extent % hosts == 0:
        fewer = extent // hosts
    else:
        fewer = max(n for n in range(1, extent) if extent % n == 0)
    axis = f"tp{fewer}" if fewer > 1 else "without tp"
    more = f"{extent // fewer} times as many data ranks"
    edit = f"set a layout {axis} in place of tp{extent}, with {more}"
    part = 1 - ((fewer - 1) / fewer) / ((extent - 1) / extent)
    low, high = cause.interval
    # low: the all-reduces of gradients, between more data ranks, take what this one saves
    return Saving(edit, Interval(part * cause.share, min(0.0, part * low), part * high), FORMULA)


def split_sequence(e: Evidence, cause: Cause) -> Saving | None:
    """Propose parts of the sequence where ranks exchange by all-reduces."""
    if cause.evidence.get("collective") != "all-reduce":
        return None
    return Saving(True, None, TRIED)


def _figures(cause: Cause) -> PipelineFigures | None:
    """Return the figures of the pipeline, which are the evidence of its cause."""
    return PipelineFigures(**cause.evidence) if "stage_s" in cause.evidence else None


def _of_bubble(cause: Cause, value: str | int, part: float, source: str) -> Saving:
    """Return a saving of a part of the bubble, which is at most all of it."""
    return scaled(cause, min(max(part, 0.0), 1.0), source, value)


def more_micro_batches(e: Evidence, cause: Cause) -> Saving | None:
    """Propose twice as many micro-batches, if a batch has as many samples."""
    one = _figures(cause)
    if one is None or not e.report.samples:
        return None
    count = 2 * one.micro_batches
    data_ranks = {place.get(DATA, 0) for place in e.report.mesh.values()}
    if e.report.samples / e.steps / max(len(data_ranks), 1) < count:
        return None
    less = one.formula - idle_share(one.schedule, one.stages, count)
    return _of_bubble(cause, count, less / one.bubble, FORMULA)


def other_schedule(e: Evidence, cause: Cause) -> Saving | None:
    """Propose zero-bubble in place of schedules with a longer bubble; not with a tensor axis."""
    if any(TENSOR in place for place in e.report.mesh.values()):
        return None  # layouts with both are refused
    one = _figures(cause)
    if one is None:
        return Saving(ZERO_BUBBLE, Interval(cause.share / 2, 0.0, cause.share), FORMULA)
    if one.schedule == ZERO_BUBBLE:
        return None
    less = one.formula - idle_share(ZERO_BUBBLE, one.stages, one.micro_batches)
    return _of_bubble(cause, ZERO_BUBBLE, less / one.bubble, FORMULA) if less > 0 else None


def other_balance(e: Evidence, cause: Cause) -> Saving | None:
    """Propose the division in which the longest stage is shorter, if the run has measured one."""
    one = _figures(cause)
    if one is None or not one.balance:
        return None
    longest, mean = max(one.stage_s), sum(one.stage_s) / len(one.stage_s)
    wait = 1 - mean / longest  # of the stages' time, because of their differences
    return _of_bubble(cause, ", ".join(one.balance), min(wait / one.bubble, 1.0) / 2, RECORD)
