"""Predict how much of a step's time each knob saves.

There is one function per knob. It uses the ladder, the record, or a formula over both. A saving is
a share of the measured step time, with an interval.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.evidence import MIN_SHARE, Evidence
from ..analyze.diagnosis.rules.ranks import data
from ..analyze.diagnosis.rungs import Interval
from ..analyze.figures.pipeline import PipelineFigures
from ..cost.layout import idle_share
from ..knobs.knob import ALL, FORMULA, LADDER, RECORD, Share, Tried
from ..knobs.registry import KNOBS

TRIED = "a few steps"  # a measurement of a few steps with the knob set
MAX_WORKERS = 16  # loader workers per rank
# Target time of all workers together per batch, as a share of the training's own time.
WORKER_TIME_SHARE = 0.5
PREFETCH_FACTOR = 8  # prefetched batches per worker, if the default of two was not enough
HANDOVER_SHARE = 0.03  # share of a step: cost of receiving a batch from a worker, measured
MAX_REMAINING_START_SHARE = 0.3  # share of a loader's start that may remain with persistent workers


@dataclass(frozen=True)
class Saving:
    """Predicted saving of one knob.

    Attributes:
        value: Value of the knob.
        saves: Saved share of a step; None if it must be measured in a few steps.
        source: Kind of the prediction: LADDER, RECORD, FORMULA or TRIED; or a bound.
    """

    value: Any
    saves: Interval | None
    source: str


PredictSaving = Callable[[Evidence, Cause], Saving | None]


def scaled(cause: Cause, part: float, source: str, value: Any = True) -> Saving:
    """Return a saving of a part of the cause's share."""
    low, high = cause.interval
    return Saving(value, Interval(part * cause.share, part * low, part * high), source)


def loader_workers(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of loader workers.

    All times are in units of the measured step. With W workers a step takes
    max(C, S / W, (S b + C u) / c) + HANDOVER_SHARE, where C is the step time without input, S the
    time in which one process makes a step's batches, b the share of S that uses the CPU, c the
    number of cores per rank, and u the number of cores that training keeps busy.
    """
    bar = e.waterfall.of_step("input")
    if bar is None or e.loader is None or not e.loader["seconds"] or e.loader.get("keras"):
        return None
    has = e.loader["workers"] / e.loader["ranks"]
    own = 1 - bar.mean
    making = has or bar.mean
    busy = min(e.loader["busy_s"] / e.loader["seconds"] / max(has, 1), 1.0)
    cores = (e.cores or e.per_host) / e.per_host
    count = min(max(math.ceil(making / (WORKER_TIME_SHARE * own)), int(has) + 1), MAX_WORKERS)
    computing = making * busy + own * e.mean_usage("cached", "process")
    step = max(own, making / count, computing / cores)
    half = (bar.high - bar.low) / 2
    mean = 1 - step - HANDOVER_SHARE
    return Saving(
        count, Interval(mean, mean - half - HANDOVER_SHARE, mean + half + HANDOVER_SHARE), FORMULA
    )


def persistent_workers(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of persistent workers: all starts but the wait for the first batch."""
    workers = e.loader["workers"] if e.loader is not None else cause.id == "loader-start"
    if not workers:
        return None
    share = e.mean_usage("everything", "starting")
    low, high = (1 - MAX_REMAINING_START_SHARE) * share, share
    return Saving(True, Interval((low + high) / 2, low, high), RECORD)


def prefetch(e: Evidence, cause: Cause) -> Saving | None:
    """Propose more prefetched batches, if there are workers; it helps if some batches take long."""
    if e.loader is None or not e.loader["workers"]:
        return None
    return Saving(PREFETCH_FACTOR, None, TRIED)


def paceline_exchange(e: Evidence, cause: Cause) -> Saving | None:
    """Propose Paceline's exchange on CPUs, if the job does not use it yet.

    Between nodes it sends fewer bytes over the network. In a ring of N ranks that crosses node
    boundaries h times, each of H nodes sends h / H times 2 (N - 1) / N of a vector. Paceline's
    exchange sends 2 (H - 1) / H of a vector once for all ranks of a node.
    """
    if e.first_facts.get("gpu") or e.first_facts.get("exchange") == "paceline":
        return None
    hosts = e.report.hosts
    count, size = len(set(hosts)), len(hosts)
    if count == 1 or cause.id != "exchange-bandwidth":
        return Saving("paceline", None, TRIED)
    leaves = sum(one != other for one, other in pairwise([*hosts, hosts[0]]))
    less = 1 - (count - 1) / (leaves * (size - 1) / size)
    return replace(scaled(cause, max(less, 0.0), FORMULA), value="paceline")


def setting_of(user: str, bandwidth: Any, latency: Any) -> PredictSaving:
    """Return a function that proposes a setting of NCCL or Horovod, by what limits the exchange.

    Args:
        user: The fact about a script that uses the setting: "gpu", "horovod".
        bandwidth: Value where bandwidth is the limit, or an exchange that begins late.
        latency: Value where many small collectives are.
    """

    def gain(e: Evidence, cause: Cause) -> Saving | None:
        value = latency if cause.id == "exchange-latency" else bandwidth
        return Saving(value, None, TRIED) if e.first_facts.get(user) else None

    return gain


def between_nodes(value: Any) -> PredictSaving:
    """Return a function that proposes ``value`` between nodes only.

    On one node the knob is tried only if requested by name, because it changes the training.
    """
    return lambda e, cause: Saving(value, None, TRIED) if len(set(e.report.hosts)) > 1 else None


def storage_wait(e: Evidence, cause: Cause) -> Saving | None:
    """Predict a saving of the time in which the loader's processes waited for storage."""
    if e.loader is None or not e.loader["seconds"]:
        return None
    workers = max(e.loader["workers"], e.loader["ranks"])
    return scaled(cause, max(1 - e.loader["busy_s"] / e.loader["seconds"] / workers, 0), RECORD)


def accumulate_locally(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of accumulating locally: (k - 1) / k, as k exchanges become one."""
    k = e.gradients.exchanging if e.gradients is not None else 0.0
    return scaled(cause, (k - 1) / k, RECORD) if k > 1 else None


def one_thread(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of one thread per rank, from the ladder's rung that measured it."""
    found = e.step_time_saving("one thread", "silent")
    return Saving(1, found, LADDER) if found is not None else None


def without_own_binding(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving without the script's own CPU binding.

    It applies only if the script itself has narrowed the set of cores that its launcher assigned.
    """
    narrowed = any(
        facts_of_rank.get("mask") != facts_of_rank.get("mask_at_start") for facts_of_rank in e.facts
    )
    return saving_of_share(cause, Share(ALL, LADDER)) if narrowed else None


def keep_memory(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of keeping memory.

    It is at least the first touches of pages, and at most all kernel CPU time in that phase, as
    pages are also returned to the system. An experiment that measured it is better.
    """
    if cause.measured is not None:
        return Saving(True, Interval(cause.share, *cause.interval), LADDER)
    kernel = (
        e.mean_usage("silent", "system") / max(e.threads or 1, 1) * e.relative_step_time("silent")
    )
    most = max(kernel, cause.share)
    return Saving(True, Interval((cause.share + most) / 2, cause.share, most), RECORD)


def autocast_bf16(e: Evidence, cause: Cause) -> Saving | None:
    """Propose bfloat16, if the ranks measured sufficiently faster matrix products in it."""
    product_s = e.first_facts.get("product_s", {})
    if "bfloat16" not in product_s or "float32" not in e.first_facts.get("parameters", {}):
        return None
    most = cause.share * (1 - product_s["bfloat16"] / product_s["float32"])
    return Saving(True, None, TRIED) if most >= MIN_SHARE else None


def compile_model(e: Evidence, cause: Cause) -> Saving | None:
    """Propose to compile the model, if the script wraps it in DDP: it is compiled at that point.

    Batches of different sizes would compile it again and again.
    """
    if "ddp" not in e.first_facts or data(e) is not None:
        return None
    return Saving(True, None, TRIED)


def read_ahead(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving if batches are made during the training, without a loader to set.

    Keras makes loaders itself: their workers are set in the script.

    A step then takes the longer of both, and HANDOVER_SHARE.
    """
    if e.loader is not None and not e.loader.get("keras"):
        return None
    low, high = cause.interval
    mean, least, most = (min(x, 1 - x) - HANDOVER_SHARE for x in (cause.share, low, high))
    return Saving(True, Interval(mean, min(least, most), max(least, most)), FORMULA)


def more_cores(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving without the launcher's binding; see ``without_own_binding``."""
    narrowed = without_own_binding(e, cause) is not None
    return None if narrowed else saving_of_share(cause, Share(ALL, LADDER))


def without_rank(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving without the device of a slow rank; the ranks of one node without GPUs
    share its cores.
    """
    if cause.evidence.get("lines"):  # the rank's own work makes it slow
        return None
    if not e.first_facts.get("gpu") and len(set(e.report.hosts)) < 2:
        return None
    return without_one_of(e.report.size, cause)


def without_one_of(count: int, cause: Cause) -> Saving | None:
    """Predict the saving without one of ``count`` ranks or nodes.

    The others no longer wait for it, but the throughput loses its samples.
    """
    if count < 2:
        return None
    left = (count - 1) / count
    low, high = cause.interval
    mean, least, most = (1 - (1 - share) / left for share in (cause.share, low, high))
    return Saving(True, Interval(mean, least, most), RECORD)


def one_exchange(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving if n collectives per step become one: (n - 1) / n."""
    n = cause.evidence.get("calls_a_step", 1.0)
    return scaled(cause, max(n - 1, 0) / n, FORMULA) if n else None


def overlap_backward(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of overlap with the backward pass: at most half of the computing time."""
    most = min(cause.share, e.useful_share / 2)
    return Saving(True, Interval(most / 2, 0.0, most), FORMULA)


def spread_over_ranks(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving if N ranks share the work that one rank did: (N - 1) / N.

    If all ranks validate, each of them may have its part already: then nothing is saved.
    """
    n = e.report.size
    whole = scaled(cause, (n - 1) / n, FORMULA)
    if cause.id != "validation" or whole.saves is None:
        return whole
    most = whole.saves.high
    return replace(whole, saves=Interval(most / 2, 0.0, most))


def without_host(e: Evidence, cause: Cause) -> Saving | None:
    return without_one_of(len(set(e.report.hosts)), cause)


# Edits of lines of the script

ONE_RANK = "one rank"
# By what a line does: how to change it.
LINE_EDITS = {
    "python": "operators on whole tensors in place of a Python loop, or once before the training",
    "short calls": "one operator on the whole batch in place of many small ones, or torch.compile",
    "library": "in the loader's workers, once before the training, or every N steps",
    "file": "once and keep what it reads in memory, in the loader's workers, or every N steps",
    "wait": "every N steps, or in a thread whose result the next step uses",
    "garbage collection": "fewer Python objects, or gc.freeze() after the first step",
    ONE_RANK: "every N steps, or a part of it on each rank, or in a thread",
}
REPLACED = ("python", "short calls", "garbage collection")  # edits that replace the line


# By what other work of a script does: where it can be done instead. Python code in a thread would
# hold the GIL, and the training would wait for it.
SCRIPT_EDITS = {
    "python": "in another process (multiprocessing; a thread would hold the GIL)",
    "short calls": "as one operator on the whole batch",
    "library": "in another process, or in a thread if the library releases the GIL",
    "torch": "in a thread (operators of torch release the GIL)",
    "file": "in a thread (it releases the GIL while it reads or writes)",
    "wait": "in a thread whose result a later step uses",
    "garbage collection": "with fewer Python objects",
}


def edit_line(e: Evidence, cause: Cause) -> Saving | None:
    """Propose an edit of the cause's line, and predict that between nothing and all of its share
    is saved.
    """
    lines = cause.evidence.get("lines")
    if cause.id == "slow-rank" and not lines:
        return None
    doing = ONE_RANK if cause.id == "slow-rank" else str(cause.evidence.get("doing"))
    place = f" (in {str(lines[0]['file']).rpartition('/')[2]})" if lines else ""
    edit = f"execute the line {LINE_EDITS.get(doing, LINE_EDITS['library'])}{place}"
    if doing in REPLACED:
        edit = f"use {LINE_EDITS[doing]}{place}"
    return Saving(edit, Interval(cause.share / 2, 0.0, cause.share), RECORD)


def edit_script(e: Evidence, cause: Cause) -> Saving | None:
    """Propose how the script does its other work, by what that work does."""
    where = SCRIPT_EDITS.get(str(cause.evidence.get("doing")), "in another process")
    edit = f"do this work less often, or {where}"
    return Saving(edit, Interval(cause.share, *cause.interval), RECORD)


def edit_operators(e: Evidence, cause: Cause) -> Saving | None:
    """Propose the edit of a finding inside the model, whose share is an upper bound."""
    edit = cause.evidence.get("remedy")
    if cause.id == "precision" and edit is None:  # parameters in float64 have other remedies
        return None
    edit = edit or "do not compute this, or compute it in fewer operators"
    return Saving(edit, Interval(cause.share / 2, 0.0, cause.share), RECORD)


# Predict the savings of remedies of models in parts: shards (FSDP2), divided layers, pipelines.

PREFETCHED_BLOCKS = 2  # one more than the default of FSDP2
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
    size = max(e.parameter_bytes, cause.evidence.get("gathered_bytes", 0))
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


# By name of the knob, unless its row in knobs/ says what it saves.
GAINS: dict[str, PredictSaving] = {
    "loader-workers": loader_workers,
    "persistent-workers": persistent_workers,
    "prefetch": prefetch,
    "pin-memory": setting_of("gpu", True, True),
    "exchange": paceline_exchange,
    "fusion-mb": setting_of("horovod", 32.0, 128.0),
    "cycle-ms": setting_of("horovod", 0.5, 5.0),
    "nccl-algorithm": setting_of("gpu", "Ring", "Tree"),
    "nccl-protocol": setting_of("gpu", "Simple", "LL"),
    "accumulate-locally": accumulate_locally,
    "compress-powersgd": between_nodes(2),
    "compress-topk": between_nodes(0.01),
    "average-every": between_nodes(8),
    "threads": one_thread,
    "own-binding-off": without_own_binding,
    "keep-memory": keep_memory,
    "jemalloc": keep_memory,
    "autocast-bf16": autocast_bf16,
    "matmul-precision": setting_of("gpu", "high", "high"),
    "compile": compile_model,
    "one-exchange": one_exchange,
    "ddp": overlap_backward,
    "script-beside": edit_script,
    "validate-on-all": spread_over_ranks,
    "stage": storage_wait,
    "edit-line": edit_line,
    "edit-operators": edit_operators,
    "leave-rank-out": without_rank,
    "leave-host-out": without_host,
    "read-ahead": read_ahead,
    "more-cores": more_cores,
    "sharded-prefetch": prefetch_blocks,
    "sharded-keep-gathered": keep_gathered,
    "sharded-blocks": other_blocks,
    "data-parallel": data_parallel,
    "tensor-axis": smaller_axis,
    "micro-batches": more_micro_batches,
    "pipeline-schedule": other_schedule,
    "pipeline-balance": other_balance,
    "sequence-split": split_sequence,
}


def predict_saving(name: str, e: Evidence, cause: Cause) -> Saving | None:
    """Return the predicted saving of a knob for a cause; None if it is not proposed.

    A knob without a prediction is tried only if it is requested by name.
    """
    saves = KNOBS[name].saves
    if name in GAINS:
        return GAINS[name](e, cause)
    if isinstance(saves, Tried):
        return Saving(saves.value, None, TRIED)
    return saving_of_share(cause, saves) if saves is not None else None


def saving_of_share(cause: Cause, saves: Share) -> Saving:
    """Return the saving of a part of the share of a cause.

    The source of all of it is the ladder if an experiment measured the cause.
    """
    if saves.is_limit:
        most = saves.part * cause.share
        return Saving(True, Interval(most / 2, 0.0, most), saves.source)
    is_measured = saves.part == ALL and cause.measured is not None
    return scaled(cause, saves.part, LADDER if is_measured else saves.source)
