"""How the gradient of a step follows from those that the ranks computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from .relations import (
    EQUAL_WITHIN,
    MAX_BF16_EXCHANGE_ERROR,
    Fit,
    Vectors,
    add,
    distance,
    fit,
    nonfinite,
    tolerance,
)
from .steps import JointStep, numel, parameters

EQUAL_TO_MEAN = 0.01  # relative difference of a gradient that is the mean
SAME_FACTOR = 1e-3  # relative difference of equal factors
FREE_FACTOR_NUMEL = 8  # elements from which on a factor can be told from one parameter


class Kind(StrEnum):
    """What most parameters have in common."""

    UNIFORM = "uniform"  # a multiple of the sum over the ranks
    OWN = "own"  # a multiple of the rank's own gradient
    OTHER = "other"  # none of these


@dataclass(frozen=True)
class Exchange:
    """How the gradient of a step, before clipping, follows from the local ones.

    Attributes:
        step: The step.
        last: Number of backwards that it contains: the last ones before the step.
        kind: What holds for most parameters.
        factor: Of the sum over the ranks, or of the rank's own gradient.
        residual: Largest relative difference that remains.
        own: Parameters with the rank's own gradient, where most have another.
        others: Parameters that fit neither.
    """

    step: JointStep
    last: int
    kind: Kind
    factor: float = 0.0
    residual: float = 0.0
    own: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def is_mean(self) -> bool:
        """Whether the gradient is the mean of those of the ranks, for all parameters."""
        is_whole = self.kind is Kind.UNIFORM and not self.own and not self.others
        return is_whole and abs(self.multiple - 1) < EQUAL_TO_MEAN

    def are_equal(self, limit: float = EQUAL_WITHIN) -> bool:
        """Return whether the optimizers of all ranks use the same gradient.

        limit: Largest relative difference.
        """
        used = [self.step.used(rank) for rank in range(self.step.size)]
        names = self.step.names
        return all(distance(used[0][name], x[name]) <= limit for x in used for name in names)

    @property
    def multiple(self) -> float:
        """The gradient as a multiple of the mean over the ranks, for UNIFORM."""
        return self.factor * self.step.size


def exchange_of(step: JointStep, used: list[Vectors] | None = None) -> Exchange | None:
    """Return the relation of a step; None if gradients are unknown, or not finite.

    used: Gradients of each rank; those before clipping without it.
    """
    names = _comparable(step)
    if step.size < 2 or not names:
        return None
    used = used or [step.unclipped(rank) for rank in range(step.size)]
    counts = range(max(len(one) for one in step.backwards), 0, -1)
    tries = [_Try(step, last, names, used) for last in counts]
    for attempt in tries:
        if (found := attempt.exact()) is not None:
            return found
    parts = [found for attempt in tries if (found := attempt.by_parameter()) is not None]
    if parts:
        return min(parts, key=lambda one: len(one.own) + len(one.others))
    return tries[0].rest()


def _comparable(step: JointStep) -> list[str]:
    """Return parameters with a finite gradient that is not 0 on all ranks."""
    kept = []
    for name in step.names:
        rows = [
            (facts, one.gradients[name])
            for facts, backwards in zip(step.ranks, step.backwards, strict=True)
            for one in backwards
            if name in one.gradients
        ]
        if any(nonfinite(facts, row) for facts, row in rows):
            return []
        if any(facts.sketches[row].any() for facts, row in rows):
            kept.append(name)
    return kept


class _Try:
    """Tests of a step, counting its last backwards."""

    def __init__(
        self, step: JointStep, last: int, names: Sequence[str], used: list[Vectors]
    ) -> None:
        self.step, self.last, self.used = step, last, used
        self.local = [step.local(rank, last) for rank in range(step.size)]
        self.total = add(self.local)
        self.names = [name for name in names if all(name in one for one in self.local)]
        known = parameters(step.ranks[0])
        dtypes = {known[name].dtype for name in self.names if name in known}
        self.tolerance = tolerance(step.size * last, *dtypes)
        self.numel = {name: numel(known[name].shape) for name in self.names if name in known}

    def exact(self) -> Exchange | None:
        """Return the relation that holds for all parameters together, if one does."""
        if not self.names:
            return None
        for kind in (Kind.UNIFORM, Kind.OWN):
            fits = [
                fit(one, self._terms(rank, kind), self.names) for rank, one in enumerate(self.used)
            ]
            if self._agree(fits, self.tolerance):
                return self._found(kind, fits)
        return None

    def by_parameter(self) -> Exchange | None:
        """Return the relation of most parameters, and the parameters with another."""
        factors = [
            found[0].factor
            for name in self.names
            if self.numel.get(name, 0) >= FREE_FACTOR_NUMEL
            and self._agree(found := self._fits(name, Kind.UNIFORM), self.tolerance)
        ]
        if not factors:
            return None
        factor = float(np.median(factors))
        own: list[str] = []
        others: list[str] = []
        for name in self.names:
            if self._is(name, Kind.UNIFORM, factor):
                continue
            multiples = (1.0, factor * self.step.size)
            is_own = any(self._is(name, Kind.OWN, multiple) for multiple in multiples)
            if not is_own and self.numel.get(name, 0) >= FREE_FACTOR_NUMEL:
                is_own = self._agree(self._fits(name, Kind.OWN), self.tolerance)
            (own if is_own else others).append(name)
        return Exchange(
            self.step, self.last, Kind.UNIFORM, factor, self.tolerance, own=own, others=others
        )

    def rest(self) -> Exchange:
        """Return the closest relation, where none holds for any parameter exactly."""
        if self.names:
            fits = [fit(one, self.total, self.names) for one in self.used]
            if self._agree(fits, MAX_BF16_EXCHANGE_ERROR):
                return self._found(Kind.UNIFORM, fits)
        return Exchange(self.step, self.last, Kind.OTHER, residual=self._spread())

    def _spread(self) -> float:
        """Return how far the gradients are from a multiple of the mean, at most."""
        if not self.names:
            return 0.0
        return max(fit(one, self.total, self.names).residual for one in self.used)

    def _terms(self, rank: int, kind: Kind) -> Vectors:
        return self.total if kind is Kind.UNIFORM else self.local[rank]

    def _fits(self, name: str, kind: Kind) -> list[Fit]:
        return [fit(one, self._terms(r, kind), [name]) for r, one in enumerate(self.used)]

    def _is(self, name: str, kind: Kind, factor: float) -> bool:
        return all(
            distance(one[name], factor * self._terms(rank, kind)[name]) <= self.tolerance
            for rank, one in enumerate(self.used)
        )

    def _agree(self, fits: Sequence[Fit], limit: float) -> bool:
        first = fits[0].factor
        return first > 0 and all(
            one.residual <= limit and abs(one.factor - first) <= SAME_FACTOR * first for one in fits
        )

    def _found(self, kind: Kind, fits: Sequence[Fit]) -> Exchange:
        residual = max(one.residual for one in fits)
        return Exchange(self.step, self.last, kind, fits[0].factor, residual)
