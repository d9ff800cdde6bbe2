"""Successive halving (Jamieson, Talwalkar 2016, arXiv 1502.07943) over a job's own steps, and the
comparison with the job's default.

Bayesian optimization is not used: there are few candidates, most of them categorical, and a model
has ranked them already (tuner.py). Halving also tolerates the noise of single steps, and its number
of steps is known in advance:

    rung     choices               steps each
    0        6                     3, after 1 that is not counted
    1        the best 3            3, the same
    proof    the best, default     3, the same, 3 times in turns
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic

from ...plurals import counted
from ...significance import gain_of_pairs
from .choice import S

MAX_CANDIDATES = 6  # besides the default
FINALISTS = 3  # candidates left after the first round
STEPS_PER_TRIAL = 3  # counted steps of a trial; their median is the answer
WARM_UP_STEPS = 1  # uncounted steps of a trial with other settings: memory is touched anew
COMPARISON_PAIRS = 3  # of the final comparison
FALSE_KEEP_TAIL = 1 / 8  # probability that a candidate without an effect is kept


@dataclass(frozen=True)
class Trial(Generic[S]):
    """A request to run steps with the settings; the answer is the seconds of one step."""

    choice: S
    steps: int = STEPS_PER_TRIAL


@dataclass(frozen=True)
class TuningResult(Generic[S]):
    """Result of the search.

    Attributes:
        best: Best candidate of the rounds.
        step_s: Seconds of a step with it, in the final comparison.
        default_step_s: Seconds of a step with the default.
        is_faster: Whether it was faster than the default by more than the noise of the pairs.
    """

    default: S
    best: S
    step_s: float
    default_step_s: float
    is_faster: bool

    @property
    def choice(self) -> S:
        return self.best if self.is_faster else self.default

    def describe(self, steps: int) -> str:
        """Return a message for the user. steps: number of steps that the search took."""
        took, before = 1e3 * self.step_s, 1e3 * self.default_step_s
        if self.is_faster:
            words = f"{self.best}: {took:.1f} ms a step, {before:.1f} before"
        elif self.default_step_s:
            words = (
                f"the original settings remain ({before:.1f} ms a step); {self.best} took "
                f"{took:.1f}"
            )
        else:
            words = "no other setting is likely to be faster"
        return f"the exchange is tuned after {counted(steps, 'step')}: {words}"


def halving(
    default: S, likely_settings: Sequence[S]
) -> Generator[Trial[S], float, TuningResult[S]]:
    """Search among ``likely``, at most MAX_CANDIDATES of them and without the default.

    Of two that are equally fast the first is chosen.
    """
    left, found = (
        list(likely_settings[:MAX_CANDIDATES]),
        defaultdict[S, list[float]](list),
    )
    for keep in (FINALISTS, 1):
        if len(left) > keep:
            for choice in left:
                found[choice].append((yield Trial(choice)))
            left = sorted(left, key=lambda choice: median(found[choice]))[:keep]
    if not left:
        return TuningResult(default, default, 0.0, 0.0, False)
    best, times = left[0], defaultdict[S, list[float]](list)
    for pair in range(COMPARISON_PAIRS):
        for choice in (best, default) if pair % 2 else (default, best):
            times[choice].append((yield Trial(choice)))
    logs = [
        math.log(before / after) for before, after in zip(times[default], times[best], strict=True)
    ]
    _, low, _ = gain_of_pairs(logs, FALSE_KEEP_TAIL)
    return TuningResult(default, best, median(times[best]), median(times[default]), low > 0)


def max_steps(count: int) -> int:
    """Return the number of steps that a search among ``count`` candidates takes at most."""
    count = min(count, MAX_CANDIDATES)
    rungs = count * (count > FINALISTS) + min(count, FINALISTS) * (count > 1)
    asks = rungs + 2 * COMPARISON_PAIRS * (count > 0)
    # a pair begins with the settings that the previous one ended with
    stays = (COMPARISON_PAIRS - 1) * (count > 0)
    return asks * (STEPS_PER_TRIAL + WARM_UP_STEPS) - stays * WARM_UP_STEPS


class TrialSteps(Generic[S]):
    """Measures steps for a search, and passes its settings on.

    Args:
        search: Its first trial is of the present settings.
        slowest: Returns the step time that decides, from this rank's; the same on all ranks.

    Attributes:
        steps: Number of measured steps.
        has_begun: Whether a step has ended.
        result: Result of the search; None before its end.
        last_s: Answer of the last trial.
    """

    def __init__(
        self,
        search: Generator[Trial[S], float, TuningResult[S]],
        slowest: Callable[[float], float] = float,
    ) -> None:
        self._search, self._slowest = search, slowest
        self._trial, self._warm_up_steps = next(search), WARM_UP_STEPS
        self._times: list[float] = []
        self._last_end = self.last_s = 0.0
        self.steps = 0
        self.result: TuningResult[S] | None = None

    @property
    def has_begun(self) -> bool:
        return self._last_end > 0

    def after_step(self) -> S | None:
        """Note the end of a step; return the settings of the next steps if a trial has ended."""
        now, choice = time.perf_counter(), None
        if self._last_end:
            self.steps += 1
            self._times.append(now - self._last_end)
        if len(self._times) == self._warm_up_steps + self._trial.steps:
            choice = self._answer(median(self._times[self._warm_up_steps :]))
            now = time.perf_counter()  # without the time that the answer took
        self._last_end = now
        return choice

    def _answer(self, seconds: float) -> S:
        before, self._times = self._trial.choice, []
        self.last_s = self._slowest(seconds)
        try:
            self._trial = self._search.send(self.last_s)
        except StopIteration as end:
            result: TuningResult[S] = end.value
            self.result = result
            return result.choice
        self._warm_up_steps = WARM_UP_STEPS if self._trial.choice != before else 0
        return self._trial.choice
