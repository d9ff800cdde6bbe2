"""Times of the stages in the first steps: idle time beside its formula, and a better balance."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...cost.pipeline import chunks_of, idle_share
from .partition import Partition, divide

SKIPPED_STEPS = 3  # they plan, and allocate memory
MEASURED_STEPS = 20
MIN_GAIN = 0.05  # of the longest stage's time, for another balance to be proposed


class StageTimes:
    """The computing times of all stages, which each rank has after a step.

    Args:
        say: Prints a line on rank 0.
        note: Writes a field of the record's header.
        is_timed: Whether the times are those of the computation. On a GPU calls return before it
            ends, so that nothing is printed.
    """

    def __init__(
        self,
        partition: Partition,
        schedule: str,
        say: Callable[[str], None],
        note: Callable[..., None],
        is_timed: bool = True,
    ) -> None:
        self.partition, self.schedule, self._say, self._note = partition, schedule, say, note
        self._is_timed, self._steps = is_timed, 0
        self._busy: list[int] = []
        self._whole = 0

    def add(self, busy: Sequence[int], whole: Sequence[int], micro_batches: int) -> None:
        """Add the times of a step (ns) of each stage; after MEASURED_STEPS, print them."""
        self._steps += 1
        if self._steps == 1:
            self._note_header(len(busy), micro_batches)
        measured = self._steps - SKIPPED_STEPS
        if not self._is_timed or not 1 <= measured <= MEASURED_STEPS:
            return
        before = self._busy or [0] * len(busy)
        self._busy = [a + b for a, b in zip(before, busy, strict=True)]
        self._whole += max(whole)
        if measured == MEASURED_STEPS:
            self._say(self.text(micro_batches))
            self._note_header(len(busy), micro_batches, balance=self.better_balance() or [])

    def _note_header(self, stages: int, micro_batches: int, **more: Any) -> None:
        known = {"schedule": self.schedule, "stages": stages, "micro_batches": micro_batches}
        self._note(pipeline=known | more)

    def text(self, micro_batches: int) -> str:
        """Return a line about the measured steps."""
        stages, steps = len(self._busy), min(self._steps - SKIPPED_STEPS, MEASURED_STEPS)
        idle = 1 - sum(self._busy) / stages / max(self._whole, 1)
        formula = idle_share(self.schedule, stages, micro_batches)
        each = ", ".join(f"{ns / steps / 1e6:.3g}" for ns in self._busy)
        line = (
            f"pipeline: stages were idle for {idle:.0%} of {steps} steps, {formula:.0%} by the "
            f"formula; computing took {each} ms by stage"
        )
        begins = self.better_balance()
        if begins is None:
            return line
        slowest = self._busy.index(max(self._busy))
        return f"{line}. The others wait for stage {slowest}. HINT: balance={begins!r}"

    def better_balance(self) -> list[str] | None:
        """Return names for the option ``balance`` that would shorten the longest stage."""
        if chunks_of(self.schedule) > 1:
            return None
        costs = [sum(unit.cost for unit in of) for of in self.partition.units]
        units = [
            replace(unit, cost=unit.cost * ns / cost if cost else ns / len(of))
            for of, ns, cost in zip(self.partition.units, self._busy, costs, strict=True)
            for unit in of
        ]
        better = divide(units, len(costs), list(self.partition.held))
        longest = max(sum(unit.cost for unit in of) for of in better.units)
        if longest > max(self._busy) * (1 - MIN_GAIN):
            return None
        return [of[0].name for of in better.units[1:]]
