"""The loss of a step on N ranks beside that of one process with the same samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...record.training.facts.ranks import RankFacts
from ...record.training.facts.steps import BackwardFacts
from .exchange import Exchange, Kind
from .relations import epsilon
from .replay import UNMEASURED, Replay
from .steps import JointStep

DRAWN = 0.25  # of the logarithm of N: by how much random numbers change the loss of a step


@dataclass(frozen=True)
class StepLosses:
    """The values from which the backwards of a step started, added.

    Attributes:
        ranks: Combined over the ranks.
        one: Of one process.
        rounding: Relative difference that rounding makes.
    """

    ranks: float
    one: float
    rounding: float

    @property
    def size(self) -> float:
        """Relative difference."""
        return _distance(self.ranks, self.one)


def step_losses(
    replay: Replay, step: JointStep, theirs: JointStep, exchange: Exchange | None
) -> StepLosses | None:
    """Return the losses of a step; None if they are not known.

    Those of the ranks are combined as their gradients are, or averaged: also if gradients are
    summed or divided once more, their losses are those of one process.

    theirs: The same step of the replay.
    """
    if exchange is None or exchange.kind is not Kind.UNIFORM or theirs.size > 1:
        return None
    local = np.array([_sum(each[-exchange.last :]) for each in step.backwards])
    samples = np.array(step.samples, dtype=float)
    mean = float(local.mean())
    found = [exchange.factor * step.size * mean, *(mean * n for n in (1, step.size, 1 / step.size))]
    if samples.all():
        found.append(float(local @ samples / samples.sum()))
    one = _of_replay(replay, theirs)
    if not np.isfinite([*found, one]).all():
        return None
    twin = replay.twin(step)
    rounding = UNMEASURED if twin is None else _distance(one, _of_replay(replay, twin))
    least = max(epsilon(dtype) for dtype in ("float32", *replay.casts(step)))
    ranks = min(found, key=lambda value: _distance(value, one))
    return StepLosses(ranks, one, max(rounding, 4 * least, exchange.residual))


def joint_factor(
    joint: RankFacts, steps: Sequence[JointStep], exchanges: Mapping[tuple[int, int], Exchange]
) -> float:
    """Return the losses of the ranks as a multiple of those of whole batches: N, 1/N, or 1.

    Random numbers differ, so only these factors can be told apart.
    """
    found = []
    for step, theirs in zip(steps, joint.steps, strict=False):
        exchange = exchanges.get((step.optimizer, step.index))
        if exchange is None or exchange.kind is not Kind.UNIFORM:
            return 1.0
        local = [_sum(each[-exchange.last :]) for each in step.backwards]
        found.append(exchange.factor * sum(local) / (_sum(theirs.backwards) or math.nan))
    size = len(steps[0].ranks) if steps else 1
    if not found or not np.isfinite(found).all() or min(found) <= 0:
        return 1.0
    ratio = float(np.exp(np.mean(np.log(found))))
    near = (float(size), 1 / size)
    return next((x for x in near if abs(math.log(ratio / x)) < DRAWN * math.log(size)), 1.0)


def _of_replay(replay: Replay, step: JointStep) -> float:
    # Of parts that one process trains one after the other, only the last one has gradients.
    return _sum(step.steps[0].backwards if replay.in_parts else step.backwards[0])


def _sum(backwards: list[BackwardFacts]) -> float:
    return float(sum(one.root / one.scale for one in backwards))


def _distance(one: float, two: float) -> float:
    return abs(one - two) / max(abs(one), abs(two), 1e-30)
