"""The ladder's rungs as rates, and the waterfall between them: from what the ranks could do if each
were alone with its batch in memory, down to what they did. See docs/diagnose.md."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..record.states import State
from .load import Run

# Half of a 90 % interval in standard errors, by degrees of freedom (Student's t).
T90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83)


@dataclass(frozen=True)
class Climb:
    """One run of a rung. together: samples/s of all ranks at the pace of the slowest; step_s: of
    the slowest rank's mean step; steps_s: of each rank's."""

    together: float
    step_s: float
    steps_s: list[float]
    ranks: int
    cached: int  # batches that came from memory, the rank with the fewest
    silent: int  # process groups whose exchange was switched off


@dataclass(frozen=True)
class Interval:
    """A mean over repetitions, and its 90 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean, -math.inf, math.inf)
        half = T90[min(len(values), len(T90) + 1) - 2] * statistics.stdev(values)
        half /= math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)

    @property
    def sure(self) -> bool:
        """Whether it is above nothing."""
        return self.low > 0


@dataclass(frozen=True)
class Bar:
    """What one step of the waterfall costs: samples/s, the share of the ideal, and the share of
    the time that a real step takes."""

    id: str
    loss: Interval
    share: Interval
    of_step: Interval


@dataclass(frozen=True)
class Waterfall:
    """The bars' means add up to ideal - measured, exactly; of_step to 1 - measured / ideal in each
    repetition."""

    ideal: Interval
    measured: Interval
    bars: list[Bar]
    repetitions: int

    def bar(self, name: str) -> Bar:
        return next(bar for bar in self.bars if bar.id == name)


def climb(run: Run, first: int, steps: int) -> Climb:
    """The rates of one rung, in so many steps from ``first`` on.

    Raises ValueError where the script ended before them, or its samples are not known."""
    samples, seconds, told = [], [], []
    for record in run.records:
        rows = record.of(State.STEP)
        rows = rows[(rows["step"] >= first) & (rows["step"] < first + steps)]
        if len(rows) < steps:
            done = len(record.of(State.STEP))
            raise ValueError(
                f"the script ended after {done} steps, and {first + steps} are needed. HINT: "
                "--steps and --warm-up with fewer, or a script that trains longer"
            )
        took = (int(rows["end"].max()) - int(rows["start"].min())) / 1e9
        # Samples are what it takes to compare one rank with several; steps stand in for them.
        samples.append(int(rows["amount"].sum()) or len(rows))
        seconds.append(took)
        told.append(record.meta.get("rung", {}))
    slowest = max(seconds)
    return Climb(
        together=sum(samples) / slowest,
        step_s=slowest / steps,
        steps_s=[took / steps for took in seconds],
        ranks=len(seconds),
        cached=min(one.get("cached", 0) for one in told),
        silent=min(one.get("silent", 0) for one in told),
    )


def _fast_and_slow(silent: list[Climb]) -> tuple[int, int]:
    """Which rank is the fastest, and which the slowest, over all rounds: that one of them is in
    each single round says nothing."""
    means = [
        statistics.fmean(times) for times in zip(*(one.steps_s for one in silent), strict=True)
    ]
    return means.index(min(means)), means.index(max(means))


def waterfall(
    alone: list[Climb], silent: list[Climb], cached: list[Climb], everything: list[Climb]
) -> Waterfall:
    """Repetition by repetition, as they were run one after the other.

    alone: one rank, its batch in memory. silent: all ranks, without exchange. cached: with it.
    everything: with the loader, too.
    """
    ids = ("sharing", "uneven", "exchange", "input")
    ideals, ends = [], []
    losses: dict[str, list[float]] = {name: [] for name in ids}
    times: dict[str, list[float]] = {name: [] for name in ids}
    fast, slow = _fast_and_slow(silent)
    for one, free, kept, real in zip(alone, silent, cached, everything, strict=True):
        levels = (
            one.together * real.ranks,
            free.together * free.step_s / free.steps_s[fast],
            free.together * free.step_s / free.steps_s[slow],
            kept.together,
            real.together,
        )
        ideals.append(levels[0])
        ends.append(levels[-1])
        for name, above, below in zip(ids, levels, levels[1:], strict=False):
            losses[name].append(above - below)
            times[name].append(levels[-1] * (1 / below - 1 / above))
    ideal = Interval.of(ideals)
    bars = []
    for name in ids:
        shares = [loss / whole for loss, whole in zip(losses[name], ideals, strict=True)]
        found = (Interval.of(values) for values in (losses[name], shares, times[name]))
        bars.append(Bar(name, *found))
    return Waterfall(ideal, Interval.of(ends), bars, len(ideals))
