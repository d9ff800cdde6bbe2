"""Decide whether the experiments confirm a possible cause.

A cause that an experiment can switch off is named only if a step becomes shorter without it. A
cause that no experiment can switch off is named by what the record shows, or by an estimate.
"""

import math
from dataclasses import dataclass

from .evidence import MIN_SHARE
from .rungs import BARS, Interval
from .table import INDICATORS

CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE = "confirmed", "not-confirmed", "not-testable"
# What a share is based on, the most reliable first.
EXPERIMENT, RECORD, ESTIMATE = "experiment", "record", "estimate"
MAX_RELATIVE_HALF_WIDTH = 0.5  # of a share that a single experiment measured
# Of a step, in experiment and record: with too few rounds, a bar of less is no cause.
MIN_UNDECIDED = 0.1
# Parts of the bar "exchange". The record says how much of it each one is. "broadcasts" is the part
# "buffers" with an experiment of its own.
EXCHANGE_PARTS = ("buffers", "metrics", "objects", "barriers")


@dataclass(frozen=True)
class Witness:
    """One possible cause as seen by the ladder and by the record. None: it can't be seen there."""

    name: str
    ladder: Interval | None
    record: float | None

    @property
    def differ(self) -> bool:
        """Whether the two differ by more than the interval and by more than ``MIN_SHARE``."""
        if self.ladder is None or self.record is None:
            return False
        return not (self.ladder.low - MIN_SHARE <= self.record <= self.ladder.high + MIN_SHARE)

    @property
    def is_undecided(self) -> bool:
        """Whether a bar may be close to zero, although experiment and record both show a loss."""
        if self.name not in (*BARS, *EXCHANGE_PARTS) or self.ladder is None or self.record is None:
            return False
        return (
            self.ladder.low < MIN_SHARE / 2 and min(self.ladder.mean, self.record) >= MIN_UNDECIDED
        )

    @property
    def basis(self) -> str:
        """What the share is based on: EXPERIMENT, RECORD or ESTIMATE."""
        if self.ladder is not None and not self.is_undecided:
            return EXPERIMENT
        return ESTIMATE if INDICATORS[self.name].is_estimate else RECORD

    @property
    def share(self) -> float:
        """Share of a step's time: that of the experiment, if there is one that decides."""
        if self.ladder is not None and not self.is_undecided:
            return self.ladder.mean
        return self.record or 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Range of shares that the ladder and the record allow; an estimate does not widen it."""
        if self.ladder is None or self.is_undecided:
            return self.share, self.share
        bounds = [self.ladder.low, self.ladder.high]
        known = self.record is not None and not INDICATORS[self.name].is_estimate
        bounds += [self.record] if known and self.record is not None else []
        return min(bounds), max(bounds)


def verdict(witness: Witness) -> str:
    """Return CONFIRMED, NOT_CONFIRMED or NOT_TESTABLE; "" if the witness suggests no cause."""
    if witness.name in (*BARS, *EXCHANGE_PARTS):
        return _verdict_of_bar(witness)
    if witness.ladder is None:
        return NOT_TESTABLE if witness.share >= MIN_SHARE else ""
    if _is_clear(witness.ladder):
        return CONFIRMED
    expected = max(witness.ladder.mean, witness.record or 0.0)
    return NOT_CONFIRMED if expected >= MIN_SHARE else ""


def _is_clear(found: Interval) -> bool:
    """Return whether a single experiment shows a share that is large, and known well enough."""
    if not math.isfinite(found.low) or found.mean < MIN_SHARE:
        return False
    return found.low >= max(MIN_SHARE / 2, (1 - MAX_RELATIVE_HALF_WIDTH) * found.mean)


def _verdict_of_bar(witness: Witness) -> str:
    """Return the verdict on a bar of the waterfall, which the ladder and the record both see.

    Both have to see at least half of ``MIN_SHARE``, and their mean has to reach it: one of them
    alone may be off by that much. Where the time was enough for too few rounds, the record names
    the cause, unconfirmed.
    """
    if witness.ladder is None or witness.is_undecided:
        return NOT_TESTABLE if witness.share >= MIN_SHARE else ""
    if witness.share < MIN_SHARE or witness.ladder.low < MIN_SHARE / 2:
        return ""
    if witness.record is None:
        return CONFIRMED
    both = (witness.ladder.mean + witness.record) / 2
    return CONFIRMED if witness.record >= MIN_SHARE / 2 and both >= MIN_SHARE else ""
