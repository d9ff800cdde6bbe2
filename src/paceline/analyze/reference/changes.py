"""Find what changes in a run: parameters of a rank, the learning rate, all before a divergence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .band import MIN_TIME_TOLERANCE, TIME_TOLERANCE
from .run_guard import Divergence
from .series import Floats, Reference

# Ranks whose parameters drift apart, by checksums


MIN_EQUAL = 3  # comparisons in a row in which ranks agreed, so that they are replicas
MIN_DIFFERENT = 2  # comparisons in a row in which they differ


@dataclass(frozen=True)
class ReplicaDifference:
    """Ranks hold other parameters than before.

    Attributes:
        equal_at: Last step at which they were equal.
        step: First step at which they differed.
        ranks: Ranks that differ from most of the others (from rank 0 where there is no majority).
    """

    equal_at: int
    step: int
    ranks: list[int]


@dataclass
class ReplicaWatch:
    """The checksums of the ranks. ``difference`` stays once it was found."""

    ranks: int
    difference: ReplicaDifference | None = None
    _equal: int = 0
    _equal_at: int = 0
    _different: list[tuple[int, dict[int, int]]] = field(default_factory=list)

    def add(self, step: int, bits: dict[int, int]) -> ReplicaDifference | None:
        """Add the checksums of a step; return a difference when it is first certain."""
        if self.difference is not None or self.ranks < 2 or len(bits) < self.ranks:
            return None
        if len(set(bits.values())) == 1:
            if self._different:  # they differ between averages, as in local SGD
                self._equal = 0
            self._equal, self._equal_at, self._different = self._equal + 1, step, []
            return None
        if self._equal < MIN_EQUAL:
            self._equal = 0
            return None
        self._different.append((step, bits))
        if len(self._different) < MIN_DIFFERENT:
            return None
        first, values = self._different[0]
        counts = sorted(values.values(), key=list(values.values()).count)
        usual = counts[-1] if list(values.values()).count(counts[-1]) > 1 else values[min(values)]
        ranks = sorted(rank for rank, value in values.items() if value != usual)
        self.difference = ReplicaDifference(self._equal_at, first, ranks)
        return self.difference


# A learning rate that rises
#
# Schedules may depend on the loss, so that a rate falls earlier or later than in the reference. A
# rate that rises where no run of the reference rises is an event that the loss may show only later.


MIN_RISE = 3.0  # from one step to the next
MIN_REFERENCE_RISE = 1.5  # of the reference's smallest to its largest rate around there


@dataclass(frozen=True)
class RateRise:
    """The learning rate rose at ``step``, from ``old`` to ``new``."""

    step: int
    old: float
    new: float


@dataclass
class RateWatch:
    """The learning rate of one run. ``rise`` stays once it was found."""

    reference: Reference
    rise: RateRise | None = None
    _last: float = field(default=math.nan)

    def add(self, step: int, samples: float, rate: float) -> RateRise | None:
        """Add the rate of a step; return a rise that the reference does not have."""
        last, self._last = self._last, rate
        if self.rise is not None or not (last > 0 and math.isfinite(rate)):
            return None
        if rate < MIN_RISE * last:
            return None
        x = samples if self.reference.axis == "samples" else step
        if self._rises_in_reference(x):
            return None
        self.rise = RateRise(step, last, rate)
        return self.rise

    def _rises_in_reference(self, x: float) -> bool:
        """Return whether a run of the reference rises around ``x``, or its rate is not known."""
        for run in self.reference.runs:
            at = run.along(self.reference.axis)
            shift = max(TIME_TOLERANCE * x, MIN_TIME_TOLERANCE * float(at[-1] - at[0]))
            rates = run.rates[(at >= x - shift) & (at <= x + shift)]
            rates = rates[np.isfinite(rates)]
            if not len(rates):
                return True
            lowest = np.minimum.accumulate(rates)
            if bool(np.any(rates > MIN_REFERENCE_RISE * lowest)):
                return True
        return False


# Changes in the steps around a divergence from the reference


BEFORE, AFTER = 50, 10  # steps before the divergence and since it that are compared
BEFORE_START = 10  # steps before the first step outside of the band, in which a cause may lie
MIN_RATE_RATIO, MIN_NORM_RATIO = 1.5, 3.0
MIN_LOSS_RATIO = 2.0  # of a rank's loss to that of the others


@dataclass(frozen=True)
class JobStep:
    """One step of all ranks.

    Attributes:
        samples: Samples of all ranks until its end; 0 if they are not known.
        loss: Mean over ranks, weighted by their samples; nan if it is not known.
        losses: Of each rank that is known.
        rate, norm: Learning rate, and largest gradient norm of a rank; nan if not known.
        bits: Checksum of the parameters of each rank that has sent one.
    """

    step: int
    samples: int
    loss: float
    losses: dict[int, float]
    rate: float
    norm: float
    bits: dict[int, int]


@dataclass(frozen=True)
class Change:
    """One thing that changed.

    Attributes:
        kind: "nonfinite", "replicas", "learning-rate", "gradient-norm" or "rank-loss".
        step: Step at which it was first seen.
        text: What changed, from which value to which.
    """

    kind: str
    step: int
    text: str


def find_changes(
    steps: Sequence[JobStep],
    first_step: int,
    reference: Reference,
    difference: ReplicaDifference | None,
    divergence: Divergence | None,
) -> list[Change]:
    """Return what changed around ``first_step``, the first step outside of the band.

    Args:
        steps: The last steps of the job, in their order.
        difference: Ranks whose parameters differ, or None.
        divergence: How the loss left the band; None if only the parameters differ.
    """
    found = []
    if difference is not None:
        found.append(_replicas(difference))
    start = first_step - BEFORE_START
    before = [s for s in steps if start - BEFORE <= s.step < start]
    since = [s for s in steps if s.step >= start]
    found += _nonfinite(since)
    if before and since:
        found += _rate(before, since, reference)
        found += _norm(before, [s for s in since if s.step >= first_step] or since)
        if divergence is not None:
            found += _rank_losses(before, since)
    return found


def _replicas(difference: ReplicaDifference) -> Change:
    ranks = ", ".join(map(str, difference.ranks))
    word = "rank" if len(difference.ranks) == 1 else "ranks"
    text = (
        f"the parameters of {word} {ranks} differ from those of the other ranks since step "
        f"{difference.step} (they were equal at step {difference.equal_at})"
    )
    return Change("replicas", difference.step, text)


def _nonfinite(steps: Sequence[JobStep]) -> list[Change]:
    has_norms = not all(math.isnan(step.norm) for step in steps)
    for one in steps:
        bad = [rank for rank, loss in one.losses.items() if not math.isfinite(loss)]
        if bad:
            text = f"the loss of rank {bad[0]} is {one.losses[bad[0]]} at step {one.step}"
            return [Change("nonfinite", one.step, text)]
        if math.isinf(one.norm) or (math.isnan(one.norm) and one.losses and has_norms):
            text = f"the gradient norm is {one.norm} at step {one.step}"
            return [Change("nonfinite", one.step, text)]
    return []


def _rate(
    before: Sequence[JobStep], since: Sequence[JobStep], reference: Reference
) -> list[Change]:
    """Compare the learning rate with its value before, and with the reference's at the step."""
    old = before[-1].rate
    for one in since:
        if not (math.isfinite(old) and math.isfinite(one.rate)) or old <= 0:
            return []
        ratio = one.rate / old
        if not 1 / MIN_RATE_RATIO < ratio < MIN_RATE_RATIO:
            usual = _reference_ratio(reference, one, before[-1])
            if usual is not None and 1 / MIN_RATE_RATIO < ratio / usual < MIN_RATE_RATIO:
                return []  # the schedule of the reference has the same jump
            text = f"the learning rate changed from {old:.3g} to {one.rate:.3g} at step {one.step}"
            return [Change("learning-rate", one.step, text)]
        old = one.rate
    return []


def _reference_ratio(reference: Reference, new: JobStep, old: JobStep) -> float | None:
    run = reference.runs[0]
    known = np.isfinite(run.rates)
    if known.sum() < 2:
        return None
    by_samples = reference.axis == "samples" and new.samples > old.samples > 0
    x: Floats = (run.samples if by_samples else run.steps)[known]
    places = (old.samples, new.samples) if by_samples else (old.step, new.step)
    rates = [float(np.interp(place, x, run.rates[known])) for place in places]
    return rates[1] / rates[0] if rates[0] > 0 else None


def _norm(before: Sequence[JobStep], since: Sequence[JobStep]) -> list[Change]:
    old = [s.norm for s in before if math.isfinite(s.norm)]
    new = [s.norm for s in since[:AFTER] if math.isfinite(s.norm)]
    if not old or not new:
        return []
    old_norm, new_norm = float(np.median(old)), float(np.median(new))
    if old_norm <= 0 or not new_norm > MIN_NORM_RATIO * old_norm:
        return []
    text = f"the gradient norm rose from {old_norm:.3g} to {new_norm:.3g} at step {since[0].step}"
    return [Change("gradient-norm", since[0].step, text)]


def _rank_losses(before: Sequence[JobStep], since: Sequence[JobStep]) -> list[Change]:
    """Find a rank whose loss changed and is far from that of the other ranks."""
    ranks = sorted({rank for one in since for rank in one.losses})
    if len(ranks) < 2:
        return []
    new = {rank: _median(since[-2 * AFTER :], rank) for rank in ranks}
    old = {rank: _median(before, rank) for rank in ranks}
    worst = max(ranks, key=lambda rank: new[rank])
    others = [new[rank] for rank in ranks if rank != worst]
    usual = float(np.median(others))
    was_usual = float(np.median([old[rank] for rank in ranks if rank != worst]))
    if usual <= 0 or not new[worst] > MIN_LOSS_RATIO * usual or old[worst] > 1.5 * was_usual:
        return []
    text = f"the loss of rank {worst} is {new[worst]:.3g}, that of the other ranks {usual:.3g}"
    return [Change("rank-loss", since[0].step, text)]


def _median(steps: Sequence[JobStep], rank: int) -> float:
    values = [s.losses[rank] for s in steps if rank in s.losses]
    return float(np.median(values)) if values else math.nan
