"""Which schedule and how many micro-batches are fastest: by a few measured steps.

Candidates take turns in the first steps, so that a drift of the machine's speed affects all of
them. They compute the same gradients, up to rounding.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ....cost.pipeline import idle_share
from .schedules import DEFAULT, MICRO_BATCHES_OF_STAGE

AUTO = "auto"  # as a schedule: measured
SKIPPED_ROUNDS = 1  # in which plans are made and memory is allocated
MEASURED_ROUNDS = 3


class Candidate(NamedTuple):
    """A schedule and a number of micro-batches."""

    schedule: str
    micro_batches: int

    def __str__(self) -> str:
        return f"schedule={self.schedule} + micro-batches={self.micro_batches}"


def candidates_for(
    stages: int, asked: int | None, samples: int, *, can_split: bool, may_differ: bool
) -> list[Candidate]:
    """Return the candidates, those that are shortest by the formula first.

    Args:
        asked: Number of micro-batches that the layout has; None: any.
        samples: Of a batch; no micro-batch is empty.
        can_split: Whether backwards can be divided in two parts ("zero-bubble").
        may_differ: Whether the number of micro-batches may change: it changes the results of batch
            normalization.
    """
    default = asked or MICRO_BATCHES_OF_STAGE * stages
    counts = [default] if asked or not may_differ else [default, 2 * default]
    counts = [count for count in counts if count <= samples] or [default]
    schedules = [DEFAULT, "zero-bubble"] if can_split else [DEFAULT]
    found = [Candidate(schedule, count) for schedule in schedules for count in counts]
    return sorted(found, key=lambda one: idle_share(one.schedule, stages, one.micro_batches))


class ScheduleChoice:
    """Measures candidates in the first steps. All stages get the same times, and choose alike."""

    def __init__(self, candidates: Sequence[Candidate], samples: int) -> None:
        self._samples = samples
        self._order = [*candidates] * (SKIPPED_ROUNDS + MEASURED_ROUNDS)
        self._skipped = SKIPPED_ROUNDS * len(candidates)
        self._times: dict[Candidate, list[int]] = {one: [] for one in candidates}
        self._begun = 0  # steps
        self.chosen: Candidate | None = candidates[0] if len(candidates) == 1 else None

    def next(self) -> Candidate:
        """Return the candidate of the next step."""
        if self.chosen is not None:
            return self.chosen
        return self._order[min(self._begun, len(self._order) - 1)]

    def begin(self, before_ns: int, samples: int) -> str:
        """Note the begin of a step, and the time of the step before; return a line, if it chooses.

        Args:
            samples: Of the step before; a batch of another size is not compared.
        """
        if self.chosen is not None:
            return ""
        last = self._begun - 1
        if last >= self._skipped and samples == self._samples:
            self._times[self._order[last]].append(before_ns)
        self._begun += 1
        if self._begun <= len(self._order):
            return ""
        medians = {one: statistics.median(of) for one, of in self._times.items() if of}
        self.chosen = min(medians, key=medians.__getitem__) if medians else self._order[0]
        each = ", ".join(f"{one} {ns / 1e6:.3g} ms" for one, ns in medians.items())
        return f"pipeline: {self.chosen}, the fastest of the measured ones: {each}"
