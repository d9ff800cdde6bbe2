"""The steps of a job, divided between the trials of a search."""

import time
from collections.abc import Callable, Generator
from statistics import median
from typing import Generic

from .choice import S
from .successive_halving import WARM_UP_STEPS, Trial, TuningResult


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
