"""The ladder's rungs as rates, and the waterfall between them: from what the ranks could do if each
were alone with its batch in memory, down to what they did. See docs/diagnose.md."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...record.ring.states import State
from ..records.load_run import Run
from ..records.read_record import Record
from ..records.state_timeline import total

BARS = ("sharing", "uneven", "validation", "checkpoint", "exchange", "input")

# Half of a 90 % interval in standard errors, by degrees of freedom (Student's t).
T90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83)


@dataclass(frozen=True)
class Climb:
    """One run of a rung. together: samples/s of all ranks at the pace of the slowest; step_s: of
    the slowest rank's mean step; by rank: mean steps without validation and checkpoints, seconds of
    these a step, and what they used of the machine (record/ring/resource_usage.py)."""

    together: float
    step_s: float
    training_s: list[float]
    validation_s: list[float]
    checkpoint_s: list[float]
    ranks: int
    cached: int  # batches that came from memory, the rank with the fewest
    silent: int  # process groups whose exchange was switched off
    used: list[dict[str, Any]]

    def at(self, rank: int, validation: bool = False, checkpoint: bool = False) -> float:
        """Samples/s if all had this rank's pace, with what it does beside training."""
        step = self.training_s[rank]
        step += self.validation_s[rank] * validation + self.checkpoint_s[rank] * checkpoint
        return self.together * self.step_s / step


class EndedError(ValueError):
    """The script ended before the steps that were to be measured."""

    def __init__(self, done: int, needed: int) -> None:
        super().__init__(
            f"the script ended after {done} steps, and {needed} are needed. HINT: --steps and "
            "--warm-up with fewer, or a script that trains longer"
        )
        self.done = done


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

    def of_step(self, name: str) -> Interval | None:
        """A bar's share of a step's time; None where there is no such bar."""
        return next((bar.of_step for bar in self.bars if bar.id == name), None)


def climb(run: Run, first: int, steps: int, phase: str = "") -> Climb:
    """The rates of one phase of a run, in so many steps from ``first`` on; with a phase's name
    also what it used of the machine.

    Raises EndedError, a ValueError, where the script ended before them."""
    samples, steps_s = 0, []
    beside: dict[int, list[float]] = {State.VALIDATION: [], State.CHECKPOINT: []}
    told: list[dict[str, Any]] = []
    for record in run.records:
        rows = record.events_in(State.STEP)
        rows = rows[(rows["step"] >= first) & (rows["step"] < first + steps)]
        if len(rows) < steps:
            raise EndedError(len(record.events_in(State.STEP)), first + steps)
        start, end = int(rows["start"].min()), int(rows["end"].max())
        # Samples are what it takes to compare one rank with several; steps stand in for them.
        samples += total(rows["amount"]) or len(rows)
        steps_s.append((end - start) / 1e9 / steps)
        for state, took in beside.items():
            took.append(_within(record, state, start, end) / 1e9 / steps)
        told.append(record.meta.get("rung", {}))
    validation, checkpoint = beside.values()
    slowest = max(steps_s)
    return Climb(
        together=samples / (slowest * steps),
        step_s=slowest,
        training_s=[a - b - c for a, b, c in zip(steps_s, validation, checkpoint, strict=True)],
        validation_s=validation,
        checkpoint_s=checkpoint,
        ranks=len(steps_s),
        cached=min(one.get("cached", 0) for one in told),
        silent=min(one.get("silent", 0) for one in told),
        used=[one.get("used", {}).get(phase, {}) for one in told],
    )


def _within(record: Record, state: int, start: int, end: int) -> int:
    """Nanoseconds of a state between two instants."""
    rows = record.events_in(state)
    both = np.minimum(rows["end"], end) - np.maximum(rows["start"], start)
    return total(both.clip(min=0))


def _slowest(climbs: list[Climb], *names: str) -> int:
    """The rank whose steps take longest over all rounds, with these parts: that a rank is the
    slowest in a single round says nothing."""
    parts = ("training_s", *names)
    count = len(climbs[0].training_s)
    sums = [sum(getattr(one, part)[i] for one in climbs for part in parts) for i in range(count)]
    return sums.index(max(sums))


def _fastest(climbs: list[Climb]) -> int:
    count = len(climbs[0].training_s)
    sums = [sum(one.training_s[i] for one in climbs) for i in range(count)]
    return sums.index(min(sums))


def waterfall(
    alone: list[Climb], silent: list[Climb], cached: list[Climb], everything: list[Climb]
) -> Waterfall:
    """Repetition by repetition, as they were run one after the other.

    alone: one rank, its batch in memory; empty where that can't be run: the ideal is then all
    ranks at the pace of the fastest. silent: all ranks, without exchange. cached: with it.
    everything: with the loader, too.
    """
    fast, slow = _fastest(silent), _slowest(silent)
    validates, saves = (
        _slowest(silent, "validation_s"),
        _slowest(silent, "validation_s", "checkpoint_s"),
    )
    ideals, ends = [], []
    losses: dict[str, list[float]] = {name: [] for name in BARS}
    times: dict[str, list[float]] = {name: [] for name in BARS}
    firsts: Sequence[Climb | None] = alone or [None] * len(silent)
    for one, free, kept, real in zip(firsts, silent, cached, everything, strict=True):
        levels = (
            one.at(0) * real.ranks if one is not None else free.at(fast),
            free.at(fast),
            free.at(slow),
            free.at(validates, validation=True),
            free.at(saves, validation=True, checkpoint=True),
            kept.together,
            real.together,
        )
        ideals.append(levels[0])
        ends.append(levels[-1])
        for name, above, below in zip(BARS, levels, levels[1:], strict=False):
            losses[name].append(above - below)
            times[name].append(levels[-1] * (1 / below - 1 / above))
    ideal = Interval.of(ideals)
    bars = []
    for name in BARS:
        if not any(losses[name]):  # no validation, say
            continue
        shares = [loss / whole for loss, whole in zip(losses[name], ideals, strict=True)]
        found = (Interval.of(values) for values in (losses[name], shares, times[name]))
        bars.append(Bar(name, *found))
    return Waterfall(ideal, Interval.of(ends), bars, len(ideals))
