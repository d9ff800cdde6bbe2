"""What each knob would save of a step's time: a function a knob, from the ladder, the record, or a
formula over both. A saving is a share of the step as it was measured, with an interval."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.evidence import WORTH, Evidence
from ..analyze.diagnosis.ladder import Interval

LADDER, RECORD, FORMULA = "the ladder", "the record", "a formula"
TRIED = "a few steps"  # a micro-measurement
MOST_WORKERS = 16  # beside a rank
SPARE = 0.5  # of the training's own time is what workers together take for a batch
AHEAD = 8  # batches of each worker, where two were not enough
HANDING = 0.03  # of a step: what a batch that a worker has made costs beside, by trials here
KEPT_STARTS = 0.3  # of the start of a loader may remain, with workers that live on


@dataclass(frozen=True)
class Saving:
    """value: of the knob. saves: of a step; None where only a few steps with it can tell."""

    value: Any
    saves: Interval | None
    source: str


Gain = Callable[[Evidence, Cause], Saving | None]


def workers(e: Evidence, cause: Cause) -> Saving | None:
    """In units of the real step, with C what it takes without input, S what one process takes to
    make its batches, b the share of S that is computing and c the cores of a rank: with W workers
    a step takes max(C, S / W, (S b + C u) / c) and HANDING, where u is how many cores training
    keeps busy."""
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
    """Of the starts that were measured, all but the wait for an epoch's first batch."""
    if e.loader is not None and not e.loader["workers"]:
        return None
    share = e.used("everything", "starting")
    low, high = (1 - KEPT_STARTS) * share, share
    return Saving(True, Interval((low + high) / 2, low, high), RECORD)


def prefetch(e: Evidence, cause: Cause) -> Saving | None:
    """Where there are workers, and batches that take long now and then."""
    if e.loader is None or not e.loader["workers"]:
        return None
    return Saving(AHEAD, None, TRIED)


def pinned(e: Evidence, cause: Cause) -> Saving | None:
    """Where there are GPUs to copy batches to."""
    return Saving(True, None, TRIED) if e.first_facts.get("gpu") else None


def by_name(e: Evidence, cause: Cause) -> Saving | None:
    """On GPUs; elsewhere only where it is asked for by its name."""
    return Saving("high", None, TRIED) if e.first_facts.get("gpu") else None


def bucket(e: Evidence, cause: Cause) -> Saving | None:
    """DDP's own size: what it saves hangs on what overlaps, which a few steps tell."""
    return Saving(25.0, None, TRIED)


def over_memory(e: Evidence, cause: Cause) -> Saving | None:
    """Of processors, where that is not what exchanges. Between hosts it is less that crosses the
    network: in a ring of N ranks that leaves a host h times, each of H hosts sends h / H times
    2 (N - 1) / N of a vector, and 2 (H - 1) / H of it once for all of its ranks."""
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
    """Only where it is asked for by its name: paceline run --tune-exchange finds it."""
    return None


def of_nccl(bandwidth: str, latency: str) -> Gain:
    """On GPUs: by what the exchange is held back."""

    def gain(e: Evidence, cause: Cause) -> Saving | None:
        value = latency if cause.id == "exchange-latency" else bandwidth
        return Saving(value, None, TRIED) if e.first_facts.get("gpu") else None

    return gain


def tried(e: Evidence, cause: Cause) -> Saving | None:
    return Saving(True, None, TRIED)


def by_asking(value: Any) -> Gain:
    """Between hosts; elsewhere only where it is asked for by its name: it changes the training."""
    return lambda e, cause: Saving(value, None, TRIED) if len(set(e.report.hosts)) > 1 else None


def whole(source: str) -> Gain:
    """All of what the cause takes."""

    def gain(e: Evidence, cause: Cause) -> Saving | None:
        return Saving(True, Interval(cause.share, *cause.interval), source)

    return gain


def scaled(e: Evidence, cause: Cause, factor: float, source: str) -> Saving:
    """So much of what the cause takes."""
    low, high = cause.interval
    return Saving(True, Interval(factor * cause.share, factor * low, factor * high), source)


def waited(e: Evidence, cause: Cause) -> Saving | None:
    """What the loader's processes did not compute: they waited for storage."""
    if e.loader is None or not e.loader["seconds"]:
        return None
    workers = max(e.loader["workers"], e.loader["ranks"])
    return scaled(e, cause, max(1 - e.loader["busy_s"] / e.loader["seconds"] / workers, 0), RECORD)


def locally(e: Evidence, cause: Cause) -> Saving | None:
    """k exchanges become one: (k - 1) / k of them."""
    k = e.gradients.exchanging if e.gradients is not None else 0.0
    return scaled(e, cause, (k - 1) / k, RECORD) if k > 1 else None


def threads(e: Evidence, cause: Cause) -> Saving | None:
    """What the ladder's rung with one thread a rank took less."""
    found = e.gained("one thread", "silent")
    return Saving(1, found, LADDER) if found is not None else None


def unbound(e: Evidence, cause: Cause) -> Saving | None:
    """Only where the script itself has narrowed the cores that its launcher left it."""
    narrowed = any(one.get("mask") != one.get("mask_at_start") for one in e.facts)
    return whole(LADDER)(e, cause) if narrowed else None


def kept(e: Evidence, cause: Cause) -> Saving | None:
    """The first touches of pages at least; at most all that the kernel computes meanwhile, as pages
    are given back as well."""
    kernel = e.used("silent", "system") / max(e.threads or 1, 1) * e.of_step("silent")
    most = max(kernel, cause.share)
    return Saving(True, Interval((cause.share + most) / 2, cause.share, most), RECORD)


def narrow(e: Evidence, cause: Cause) -> Saving | None:
    """At most what a product of matrices is faster in bfloat16, where ranks have measured it."""
    told = e.first_facts.get("product_s", {})
    if "bfloat16" not in told or "float32" not in e.first_facts.get("parameters", {}):
        return None
    most = cause.share * (1 - told["bfloat16"] / told["float32"])
    return Saving(True, None, TRIED) if most >= WORTH else None


def compiling(e: Evidence, cause: Cause) -> Saving | None:
    """Where DDP takes the model: the one that is compiled."""
    return Saving(True, None, TRIED) if "ddp" in e.first_facts else None


def half(source: str) -> Gain:
    """Half of what the cause takes."""
    return lambda e, cause: scaled(e, cause, 0.5, source)


def without_rank(e: Evidence, cause: Cause) -> Saving | None:
    return fewer(e.report.size, cause)


def fewer(count: int, cause: Cause) -> Saving | None:
    """One of so many takes no part: the others are not held back, and samples/s count."""
    if count < 2:
        return None
    left = (count - 1) / count
    low, high = cause.interval
    mean, least, most = (1 - (1 - share) / left for share in (cause.share, low, high))
    return Saving(True, Interval(mean, least, most), RECORD)


def one_exchange(e: Evidence, cause: Cause) -> Saving | None:
    """n collectives become one."""
    n = cause.evidence.get("calls_a_step", 1.0)
    return scaled(e, cause, max(n - 1, 0) / n, FORMULA) if n else None


def overlapped(e: Evidence, cause: Cause) -> Saving | None:
    """What fits under the backward: at most half of the computing."""
    own = [rank["useful"] for rank in e.report.states]
    most = min(cause.share, sum(own) / len(own) / 2)
    return Saving(True, Interval(most / 2, 0.0, most), FORMULA)


def on_all(e: Evidence, cause: Cause) -> Saving | None:
    """N ranks do what one did."""
    n = e.report.size
    return scaled(e, cause, (n - 1) / n, FORMULA)


def without_host(e: Evidence, cause: Cause) -> Saving | None:
    return fewer(len(set(e.report.hosts)), cause)


# By knob (knobs/registry.py).
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
