"""What a model of DDP's exchange says: which buckets and which way are likely to be fast.

Gradients are ready at times that were measured; DDP fills buckets in that order; each goes out when
it is full and the one before has arrived. What ends after the backward is exposed. What is left out
is that the exchange takes cores from the backward: so several are tried."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .choice import Choice
from .successive_halving import MOST

MIB = 1 << 20
LEAST_MIB = 0.25  # below, what each bucket takes beside its bytes counts most
PARTS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # buckets, of which sizes follow
NEAR = (1.0, 0.8, 0.9, 1.1, 1.25)  # times such a size: the last bucket is to be short
ALIKE = 1.3  # sizes that differ by less are not both tried
OF_ONE = 3  # choices at most, of each way


@dataclass(frozen=True)
class Ready:
    """A gradient: seconds since the backward began, and bytes."""

    at: float
    nbytes: int


class Seconds:
    """Of an all-reduce of n bytes: on lines between what was measured, and on from the last two.
    measured: seconds by bytes."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        assert measured
        self._sizes = sorted(measured)
        self._seconds = [measured[size] for size in self._sizes]
        for at in range(1, len(self._sizes)):  # more bytes never take less
            self._seconds[at] = max(self._seconds[at], self._seconds[at - 1])

    def __call__(self, nbytes: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        if len(sizes) == 1 or nbytes <= sizes[0]:
            return seconds[0]
        at = min(bisect_left(sizes, nbytes), len(sizes) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at] + slope * (nbytes - sizes[at])


def buckets(gradients: Iterable[Ready], caps: Sequence[float]) -> list[Ready]:
    """As DDP fills them, in the order in which gradients are ready: bucket i is full with
    ``caps[i]`` bytes or more, those after the last one as the last one."""
    found: list[Ready] = []
    at, size = 0.0, 0
    for one in sorted(gradients, key=lambda one: one.at):
        at, size = one.at, size + one.nbytes
        if size >= caps[min(len(found), len(caps) - 1)]:
            found.append(Ready(at, size))
            size = 0
    return [*found, Ready(at, size)] if size else found


def ends(full: Iterable[Ready], seconds: Callable[[float], float], narrower: int = 1) -> float:
    """Seconds from the backward's begin until the last bucket has arrived."""
    end = 0.0
    for one in full:
        end = max(end, one.at) + seconds(one.nbytes / narrower)
    return end


def likely(
    gradients: Sequence[Ready], ways: Mapping[str, Seconds], default: Choice, bf16: bool = False
) -> list[Choice]:
    """At most MOST choices beside the default, by the model's order: of each way the best sizes,
    and no two sizes of a way that are almost the same. bf16: whether that may be chosen."""
    whole = sum(one.nbytes for one in gradients)
    said: list[tuple[float, Choice]] = []
    for way, seconds in ways.items():
        for narrow in (False, True) if bf16 else (False,):
            for mib in _sizes(gradients, whole, seconds, 1 + narrow):
                full = buckets(gradients, [mib * MIB])
                said.append((ends(full, seconds, 1 + narrow), Choice(mib, way, narrow)))
    said.sort(key=lambda one: one[0])
    of_one = OF_ONE if len(ways) > 1 or bf16 else MOST
    taken: list[Choice] = []
    for _, choice in said:
        like = [one for one in taken if (one.way, one.bf16) == (choice.way, choice.bf16)]
        if len(like) < of_one and not any(_alike(one, choice) for one in like):
            taken.append(choice)
    return [one for one in taken if one != default][:MOST]


def _alike(one: Choice, other: Choice) -> bool:
    return 1 / ALIKE < (one.mib or 0) / (other.mib or 1) < ALIKE


def _sizes(
    gradients: Sequence[Ready], whole: int, seconds: Seconds, narrower: int
) -> Iterable[float]:
    """In MiB; near each size that cuts the gradients into so many, the one whose last bucket ends
    first."""
    for parts in PARTS:
        size = whole / parts / MIB
        if size < LEAST_MIB and parts > 1:
            return
        near = (
            [_rounded(size * factor) for factor in NEAR] if parts > 1 else [_rounded(1.01 * size)]
        )
        yield min(near, key=lambda mib: ends(buckets(gradients, [mib * MIB]), seconds, narrower))


def _rounded(mib: float) -> float:
    """Upwards, to three figures: said to people, and for files."""
    unit = 1.0 if mib >= 100 else 0.1 if mib >= 10 else 0.01
    return max(round(math.ceil(mib / unit) * unit, 2), 0.1)
