"""Measure the gain of settings by pairs of runs, one with and one without them.

Pairs alternate between starting with and without the settings, so that a machine that warms up or
cools down affects both equally. What is averaged and tested is the logarithm of the ratio of both
throughputs: without an effect its mean is zero, whatever the noise of the two runs.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...analyze.diagnosis.remedy import Losses
from ...analyze.diagnosis.rungs import Interval, measure_rung
from ...analyze.records.load_run import Run
from ...knobs.registry import KNOBS
from ...knobs.settings import exclude
from ...record.experiments.rung import EVERYTHING, Rung
from ...significance import half_width, tail_of_look
from ..trials import in_turn
from .plan import in_bursts
from .run_script import OutOfTimeError, Runner

LOOKS = (3, 5, 8)  # numbers of pairs after which it is decided whether to measure more
MIN_GAIN = 0.02  # a trial ends when a larger gain can be excluded
FUTILE_TAIL = 0.05  # probability of excluding it wrongly
# Half of the interval of a gain at which its measurement ends: absolute, and relative to the gain.
TIGHT, TIGHT_OF_GAIN = 0.02, 0.07
WORKERS = "loader-workers"


class NoEffectError(Exception):
    """A knob had no effect in the script."""


@dataclass(frozen=True)
class Pair:
    """One run with and one without settings.

    Attributes:
        log_ratio: Logarithm of the throughput with the settings over that without them.
        losses: Training losses without and with them; None unless they change numbers.
    """

    log_ratio: float
    losses: tuple[float, float] | None = None


@dataclass
class Pairs:
    """Pairs of runs of the same settings, and what they say of the gain.

    Attributes:
        level: Probability that an end of an interval is wrong at any of the looks.
    """

    level: float
    looks: Sequence[int] = LOOKS
    pairs: list[Pair] = field(default_factory=list)

    @property
    def gain(self) -> Interval:
        """Gain of the throughput. All intervals of the looks are right together.

        At the end of the time there may be fewer pairs than at a look: they spend its level.
        """
        logs = [pair.log_ratio for pair in self.pairs]
        look = next(count for count in self.looks if count >= len(logs))
        return _as_gain(logs, half_width(logs, tail_of_look(look, self.looks, self.level)))

    @property
    def futile(self) -> bool:
        """Whether the gain is at most ``MIN_GAIN``."""
        logs = [pair.log_ratio for pair in self.pairs]
        return _as_gain(logs, half_width(logs, FUTILE_TAIL)).high < MIN_GAIN

    @property
    def losses(self) -> Losses | None:
        """Mean training losses of all pairs."""
        known = [pair.losses for pair in self.pairs if pair.losses is not None]
        if not known:
            return None
        without, with_it = zip(*known, strict=True)
        spread = max(without) - min(without)
        return Losses(statistics.fmean(without), statistics.fmean(with_it), spread)


def measure_pairs(
    pair: Callable[[int], Pair], level: float, until: Callable[[Pairs], bool]
) -> Pairs:
    """Measure pairs until ``until`` is true of them after one of ``LOOKS``, or the last look.

    Args:
        pair: Measures the pair of this number, from 0 on.
        level: Probability that an end of the interval is wrong at any of the looks.
        until: Returns whether the pairs are enough.

    Returns:
        Fewer pairs if the time is over before, at least those of the first look.

    Raises:
        OutOfTimeError: The time is over before the first look: nothing can be decided then.
    """
    found = Pairs(level, LOOKS)
    for count in LOOKS:
        while len(found.pairs) < count:
            try:
                found.pairs.append(pair(len(found.pairs)))
            except OutOfTimeError:
                if len(found.pairs) < LOOKS[0]:
                    raise
                return found
        if until(found):
            break
    return found


def is_decided(found: Pairs) -> bool:
    """Whether the settings help, make steps longer, or gain too little to go on."""
    return found.gain.low > 0 or found.gain.high < 0 or found.futile


def is_precise(found: Pairs) -> bool:
    """Whether the gain is known precisely enough to report it."""
    gain = found.gain
    return gain.high - gain.low < 2 * max(TIGHT, TIGHT_OF_GAIN * abs(gain.mean))


def _as_gain(logs: Sequence[float], half: float) -> Interval:
    middle = statistics.fmean(logs)
    ends = (middle - half, middle, middle + half)
    low, mean, high = (math.expm1(min(log, 700.0)) for log in ends)  # 700: below overflow
    return Interval(mean, low, high)


class PairedRuns:
    """Runs the script with and without settings."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def pair(
        self, base: dict[str, Any], added: dict[str, Any], steps: int, at: int, name: str
    ) -> Pair:
        """Run the script once with ``base`` and once with ``base`` and ``added``.

        Args:
            base: Settings of both runs.
            added: Settings whose gain is measured.
            steps: Measured steps of each run.
            at: Number of the pair, which says which run is first.
            name: What the settings are called in messages.

        Raises:
            NoEffectError: A setting was not set on any rank.
            ValueError: One of the runs failed, or the settings exclude each other.
        """
        if WORKERS in added:  # whole bursts of these, and of 2, as scripts often have
            steps = in_bursts(steps, math.lcm(2, int(added[WORKERS])))
        settings = {**base, **added}
        exclude(settings)
        warm = replace(self.runner.asked, settings=settings).warming
        numbers = any(KNOBS[knob].numbers for knob in added)
        rates, losses = {}, {}
        for on in in_turn((False, True), at):
            said = f"{'with' if on else 'without'} {name}, {steps} steps"
            rung = Rung(warm, steps, (EVERYTHING,), losses=numbers)
            run = self.runner.run(False, rung, settings=settings if on else base, named=said)
            if on:
                _check_effect(run, added)
            rates[on] = measure_rung(run, warm, steps, EVERYTHING).together
            each = [record.meta.get("rung", {}).get("loss") for record in run.records]
            if numbers and None not in each:
                losses[on] = sum(each) / len(each)
        both = (losses[False], losses[True]) if len(losses) == 2 else None
        return Pair(math.log(rates[True] / rates[False]), both)


def _check_effect(run: Run, added: dict[str, Any]) -> None:
    for knob in added:
        each = [record.meta.get("knobs", {}).get(knob, {}) for record in run.records]
        if not any(one.get("set") for one in each):
            why = next((one["why_not"] for one in each if one.get("why_not")), "")
            raise NoEffectError(why or "the script never calls what the knob changes")
