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
from ..analyze.diagnosis.evidence import WORTH, Evidence
from ..analyze.diagnosis.ladder import Interval

LADDER, RECORD, FORMULA = "the ladder", "the record", "a formula"
TRIED = "a few steps"  # a measurement of a few steps with the knob set
MOST_WORKERS = 16  # loader workers per rank
SPARE = 0.5  # target time of all workers together per batch, as a share of the training's own time
AHEAD = 8  # prefetched batches per worker, if the default of two was not enough
HANDING = 0.03  # share of a step: cost of receiving a batch from a worker, measured
KEPT_STARTS = 0.3  # share of a loader's start that may remain with persistent workers


@dataclass(frozen=True)
class Saving:
    """Predicted saving of one knob.

    Attributes:
        value: Value of the knob.
        saves: Saved share of a step; None if it must be measured in a few steps.
        source: Kind of the prediction: LADDER, RECORD, FORMULA or TRIED.
    """

    value: Any
    saves: Interval | None
    source: str


Gain = Callable[[Evidence, Cause], Saving | None]


def workers(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of loader workers.

    All times are in units of the measured step. With W workers a step takes
    max(C, S / W, (S b + C u) / c) + HANDING, where C is the step time without input, S the time in
    which one process makes a step's batches, b the share of S that uses the CPU, c the number of
    cores per rank, and u the number of cores that training keeps busy.
    """
    bar = e.waterfall.of_step("input")
    if bar is None or e.loader is None or not e.loader["seconds"]:
        return None
    has = e.loader["workers"] / e.loader["ranks"]
    own = 1 - bar.mean
    making = has or bar.mean
    busy = min(e.loader["busy_s"] / e.loader["seconds"] / max(has, 1), 1.0)
    cores = (e.cores or e.per_host) / e.per_host
    count = min(max(math.ceil(making / (SPARE * own)), int(has) + 1), MOST_WORKERS)
    computing = making * busy + own * e.used("cached", "process")
    step = max(own, making / count, computing / cores)
    half = (bar.high - bar.low) / 2
    mean = 1 - step - HANDING
    return Saving(count, Interval(mean, mean - half - HANDING, mean + half + HANDING), FORMULA)


def persistent(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of persistent workers: all starts but the wait for the first batch."""
    if e.loader is not None and not e.loader["workers"]:
        return None
    share = e.used("everything", "starting")
    low, high = (1 - KEPT_STARTS) * share, share
    return Saving(True, Interval((low + high) / 2, low, high), RECORD)


def prefetch(e: Evidence, cause: Cause) -> Saving | None:
    """Propose more prefetched batches, if there are workers; it helps if some batches take long."""
    if e.loader is None or not e.loader["workers"]:
        return None
    return Saving(AHEAD, None, TRIED)


def pinned(e: Evidence, cause: Cause) -> Saving | None:
    """Propose pinned memory, if there are GPUs to copy batches to."""
    return Saving(True, None, TRIED) if e.first_facts.get("gpu") else None


def by_name(e: Evidence, cause: Cause) -> Saving | None:
    """Propose a lower matmul precision on GPUs; on CPUs it is tried only if requested by name."""
    return Saving("high", None, TRIED) if e.first_facts.get("gpu") else None


def bucket(e: Evidence, cause: Cause) -> Saving | None:
    """Propose DDP's default bucket size; its saving depends on the overlap, to be measured."""
    return Saving(25.0, None, TRIED)


def over_memory(e: Evidence, cause: Cause) -> Saving | None:
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
    return replace(scaled(e, cause, max(less, 0.0), FORMULA), value="paceline")


def not_proposed(e: Evidence, cause: Cause) -> Saving | None:
    """Propose nothing: the knob is tried only if requested by name.

    ``paceline run --tune-exchange`` finds its value.
    """
    return None


def of_nccl(bandwidth: str, latency: str) -> Gain:
    """Return a function that proposes an NCCL setting on GPUs, by what limits the exchange."""

    def gain(e: Evidence, cause: Cause) -> Saving | None:
        value = latency if cause.id == "exchange-latency" else bandwidth
        return Saving(value, None, TRIED) if e.first_facts.get("gpu") else None

    return gain


def tried(e: Evidence, cause: Cause) -> Saving | None:
    return Saving(True, None, TRIED)


def by_asking(value: Any) -> Gain:
    """Return a function that proposes ``value`` between nodes only.

    On one node the knob is tried only if requested by name, because it changes the training.
    """
    return lambda e, cause: Saving(value, None, TRIED) if len(set(e.report.hosts)) > 1 else None


def whole(source: str) -> Gain:
    """Return a function that predicts that all of the cause's share is saved."""

    def gain(e: Evidence, cause: Cause) -> Saving | None:
        return Saving(True, Interval(cause.share, *cause.interval), source)

    return gain


def scaled(e: Evidence, cause: Cause, factor: float, source: str) -> Saving:
    """Return a saving of ``factor`` times the cause's share."""
    low, high = cause.interval
    return Saving(True, Interval(factor * cause.share, factor * low, factor * high), source)


def waited(e: Evidence, cause: Cause) -> Saving | None:
    """Predict a saving of the time in which the loader's processes waited for storage."""
    if e.loader is None or not e.loader["seconds"]:
        return None
    workers = max(e.loader["workers"], e.loader["ranks"])
    return scaled(e, cause, max(1 - e.loader["busy_s"] / e.loader["seconds"] / workers, 0), RECORD)


def locally(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of accumulating locally: (k - 1) / k, as k exchanges become one."""
    k = e.gradients.exchanging if e.gradients is not None else 0.0
    return scaled(e, cause, (k - 1) / k, RECORD) if k > 1 else None


def threads(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of one thread per rank, from the ladder's rung that measured it."""
    found = e.gained("one thread", "silent")
    return Saving(1, found, LADDER) if found is not None else None


def unbound(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving without the script's own CPU binding.

    It applies only if the script itself has narrowed the set of cores that its launcher assigned.
    """
    narrowed = any(one.get("mask") != one.get("mask_at_start") for one in e.facts)
    return whole(LADDER)(e, cause) if narrowed else None


def kept(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of keeping memory.

    It is at least the first touches of pages, and at most all kernel CPU time in that phase, as
    pages are also returned to the system.
    """
    kernel = e.used("silent", "system") / max(e.threads or 1, 1) * e.of_step("silent")
    most = max(kernel, cause.share)
    return Saving(True, Interval((cause.share + most) / 2, cause.share, most), RECORD)


def narrow(e: Evidence, cause: Cause) -> Saving | None:
    """Propose bfloat16, if the ranks measured sufficiently faster matrix products in it."""
    told = e.first_facts.get("product_s", {})
    if "bfloat16" not in told or "float32" not in e.first_facts.get("parameters", {}):
        return None
    most = cause.share * (1 - told["bfloat16"] / told["float32"])
    return Saving(True, None, TRIED) if most >= WORTH else None


def compiling(e: Evidence, cause: Cause) -> Saving | None:
    """Propose to compile the model, if the script wraps it in DDP: it is compiled at that point."""
    return Saving(True, None, TRIED) if "ddp" in e.first_facts else None


def half(source: str) -> Gain:
    """Return a function that predicts that half of the cause's share is saved."""
    return lambda e, cause: scaled(e, cause, 0.5, source)


def without_rank(e: Evidence, cause: Cause) -> Saving | None:
    return fewer(e.report.size, cause)


def fewer(count: int, cause: Cause) -> Saving | None:
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
    return scaled(e, cause, max(n - 1, 0) / n, FORMULA) if n else None


def overlapped(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving of overlap with the backward pass: at most half of the computing time."""
    own = [rank["useful"] for rank in e.report.states]
    most = min(cause.share, sum(own) / len(own) / 2)
    return Saving(True, Interval(most / 2, 0.0, most), FORMULA)


def on_all(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving if N ranks share the work that one rank did: (N - 1) / N."""
    n = e.report.size
    return scaled(e, cause, (n - 1) / n, FORMULA)


def without_host(e: Evidence, cause: Cause) -> Saving | None:
    return fewer(len(set(e.report.hosts)), cause)


# Keys are names of knobs (knobs/registry.py).
GAINS: dict[str, Gain] = {
    "loader-workers": workers,
    "persistent-workers": persistent,
    "prefetch": prefetch,
    "pin-memory": pinned,
    "bucket-mb": bucket,
    "exchange": over_memory,
    "algorithm": not_proposed,
    "nccl-algorithm": of_nccl("Ring", "Tree"),
    "nccl-protocol": of_nccl("Simple", "LL"),
    "nccl-channels": not_proposed,
    "gradient-views": tried,
    "unused-search-off": whole(RECORD),
    "accumulate-locally": locally,
    "compress-bf16": tried,
    "compress-fp16": tried,
    "compress-powersgd": by_asking(2),
    "compress-topk": by_asking(0.01),
    "average-every": by_asking(8),
    "threads": threads,
    "own-binding-off": unbound,
    "keep-memory": kept,
    "jemalloc": kept,
    "huge-pages": tried,
    "channels-last": whole(LADDER),
    "autocast-bf16": narrow,
    "matmul-precision": by_name,
    "compile": compiling,
    "float32": whole(FORMULA),
    "one-exchange": one_exchange,
    "ddp": overlapped,
    "no-synchronisation": whole(RECORD),
    "script-beside": whole(RECORD),
    "threads-beside": whole(RECORD),
    "validate-on-all": on_all,
    "async-checkpoint": whole(LADDER),
    "rarer-checkpoint": half(LADDER),
    "larger-batch": half(FORMULA),
    "pack": half(FORMULA),
    "stage": waited,
    "offline": tried,
    "leave-rank-out": without_rank,
    "equal-batches": whole(LADDER),
    "leave-host-out": without_host,
}
