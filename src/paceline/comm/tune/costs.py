"""A cost model of DDP's exchange: which buckets and methods are likely to be fast.

Gradients are ready at measured times; DDP fills buckets in that order; each bucket is sent when it
is full and the previous one has arrived. What ends after the backward is exposed. The model ignores
that the exchange takes CPU time from the backward: therefore several candidates are tried.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .choice import ExchangeSettings
from .successive_halving import MAX_CANDIDATES

MIB = 1 << 20
MIN_BUCKET_MIB = 0.25  # below it a bucket's fixed cost dominates
BUCKET_COUNTS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of buckets to try
SIZE_FACTORS = (1.0, 0.8, 0.9, 1.1, 1.25)  # times an even division: the last bucket should be short
MIN_SIZE_RATIO = 1.3  # of two bucket sizes, for both to be tried
MAX_PER_METHOD = 3  # candidates of each method


@dataclass(frozen=True)
class ReadyGradient:
    """A gradient, or a bucket.

    Attributes:
        at: Seconds since the backward began when it is ready.
        nbytes: Size in bytes.
    """

    at: float
    nbytes: int


class AllReduceCost:
    """Seconds of an all-reduce by its bytes: linear between measurements, extrapolated from the
    last two.

    measured: seconds by bytes.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        assert measured
        self._sizes = sorted(measured)
        self._seconds = [measured[size] for size in self._sizes]
        for at in range(1, len(self._sizes)):  # more bytes never take less time
            self._seconds[at] = max(self._seconds[at], self._seconds[at - 1])

    def __call__(self, nbytes: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        if len(sizes) == 1 or nbytes <= sizes[0]:
            return seconds[0]
        at = min(bisect_left(sizes, nbytes), len(sizes) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at] + slope * (nbytes - sizes[at])


def buckets(gradients: Iterable[ReadyGradient], caps: Sequence[float]) -> list[ReadyGradient]:
    """Return the buckets as DDP fills them, in the order in which gradients are ready.

    Bucket i is full with ``caps[i]`` bytes or more; later ones use the last cap.
    """
    found: list[ReadyGradient] = []
    at, size = 0.0, 0
    for one in sorted(gradients, key=lambda one: one.at):
        at, size = one.at, size + one.nbytes
        if size >= caps[min(len(found), len(caps) - 1)]:
            found.append(ReadyGradient(at, size))
            size = 0
    return [*found, ReadyGradient(at, size)] if size else found


def finish_time(
    full: Iterable[ReadyGradient], seconds: Callable[[float], float], narrower: int = 1
) -> float:
    """Return the seconds from the start of the backward until the last bucket has arrived."""
    end = 0.0
    for one in full:
        end = max(end, one.at) + seconds(one.nbytes / narrower)
    return end


def likely_settings(
    gradients: Sequence[ReadyGradient],
    costs: Mapping[str, AllReduceCost],
    default: ExchangeSettings,
    bf16: bool = False,
) -> list[ExchangeSettings]:
    """Return at most MAX_CANDIDATES settings besides the default, in the order of the model's cost.

    They are the best bucket sizes of each method, without two sizes that are almost equal. bf16:
    whether it may be chosen.
    """
    total_bytes = sum(one.nbytes for one in gradients)
    by_cost: list[tuple[float, ExchangeSettings]] = []
    for method, seconds in costs.items():
        for narrow in (False, True) if bf16 else (False,):
            for mib in _sizes(gradients, total_bytes, seconds, 1 + narrow):
                full = buckets(gradients, [mib * MIB])
                by_cost.append(
                    (finish_time(full, seconds, 1 + narrow), ExchangeSettings(mib, method, narrow))
                )
    by_cost.sort(key=lambda one: one[0])
    max_per_method = MAX_PER_METHOD if len(costs) > 1 or bf16 else MAX_CANDIDATES
    chosen: list[ExchangeSettings] = []
    for _, choice in by_cost:
        like = [one for one in chosen if (one.method, one.bf16) == (choice.method, choice.bf16)]
        if len(like) < max_per_method and not any(_is_similar(one, choice) for one in like):
            chosen.append(choice)
    return [one for one in chosen if one != default][:MAX_CANDIDATES]


def _is_similar(one: ExchangeSettings, other: ExchangeSettings) -> bool:
    return 1 / MIN_SIZE_RATIO < (one.mib or 0) / (other.mib or 1) < MIN_SIZE_RATIO


def _sizes(
    gradients: Sequence[ReadyGradient], total_bytes: int, seconds: AllReduceCost, narrower: int
) -> Iterable[float]:
    """Yield bucket sizes in MiB.

    For each number of buckets it is the size, near the even division, whose last bucket ends first.
    """
    for count in BUCKET_COUNTS:
        size = total_bytes / count / MIB
        if size < MIN_BUCKET_MIB and count > 1:
            return
        nearby = (
            [_round_up(size * factor) for factor in SIZE_FACTORS]
            if count > 1
            else [_round_up(1.01 * size)]
        )
        yield min(
            nearby, key=lambda mib: finish_time(buckets(gradients, [mib * MIB]), seconds, narrower)
        )


def _round_up(mib: float) -> float:
    """Round up to three figures: the value is shown to people and written to files."""
    unit = 1.0 if mib >= 100 else 0.1 if mib >= 10 else 0.01
    return max(round(math.ceil(mib / unit) * unit, 2), 0.1)
