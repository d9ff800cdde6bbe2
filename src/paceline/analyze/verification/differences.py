"""The first difference between the training of N ranks and that of fewer with the same samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from .exchange import Exchange, Kind
from .losses import StepLosses, step_losses
from .relations import ROUNDINGS, Vectors, distance, epsilon, vectors
from .replay import NOISE_FACTOR, Replay, significant
from .steps import JointStep, parameters, shown

STATISTICS = ("running_mean", "running_var")
IN_TURN = " that trains the ranks' batches in turn"
VISIBLE = {"gradient": 1e-5, "clipped gradient": 1e-5, "update": 1e-3, "buffer": 1e-4}


class What(StrEnum):
    """What differs."""

    LOSS = "loss"
    GRADIENT = "gradient"
    USED = "clipped gradient"
    UPDATE = "update"
    BUFFER = "buffer"


@dataclass(frozen=True)
class Difference:
    """A difference of a step that exceeds the measured rounding.

    Attributes:
        what: What differs.
        index: Number of steps of this optimizer before it.
        optimizer: Key of the optimizer.
        names: The tensors that differ, the largest difference first.
        size: Largest relative difference.
        rounding: Relative difference that rounding makes in the same tensor and step.
        against: What the ranks were compared with: "one process" or "2 ranks".
        lines: The backward and the step.
        losses: The losses of the step; None if they are not known.
    """

    what: What
    index: int
    optimizer: int
    names: list[str]
    size: float
    rounding: float
    against: str
    lines: list[str]
    losses: StepLosses | None = None

    @property
    def name(self) -> str:
        """The tensor with the largest difference."""
        return shown(self.names[0])

    @property
    def text(self) -> str:
        """The difference as a clause."""
        of = "" if self.what is What.LOSS else f" of {self.name}"
        return (
            f"in step {self.index + 1}, the {self.what}{of} differs by "
            f"{percent(self.size)} from that of {self.against} with the same samples (rounding: "
            f"{percent(self.rounding)})"
        )

    @property
    def sentence(self) -> str:
        """The difference as a sentence without full stop."""
        return f"{self.text[0].upper()}{self.text[1:]}"


def percent(share: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def first_difference(
    replay: Replay, steps: Sequence[JointStep], exchanges: Mapping[tuple[int, int], Exchange]
) -> Difference | None:
    """Return the first difference; None if all compared steps are equal to rounding.

    exchanges: By optimizer and step; each has the relative difference that it makes itself.
    """
    for step in steps:
        theirs = replay.joint(step)
        if theirs is None:
            continue
        exchange = exchanges.get((step.optimizer, step.index))
        is_known = exchange is not None and exchange.kind is not Kind.OTHER
        floor = exchange.residual if exchange is not None and is_known else 0.0
        losses = step_losses(replay, step, theirs, exchange)
        for what, limits, values in _compared(replay, step, theirs, floor):
            off = {n: x for n, x in values.items() if x > max(limits[n], VISIBLE[what])}
            if off:
                names = sorted(off, key=lambda name: -off[name])
                return Difference(
                    *(what, step.index, step.optimizer, names, off[names[0]]),
                    rounding=limits[names[0]] / NOISE_FACTOR,
                    against=replay.name + IN_TURN * replay.in_parts,
                    lines=step.lines,
                    losses=losses,
                )
        if losses is not None and losses.size > NOISE_FACTOR * losses.rounding:
            against = replay.name + IN_TURN * replay.in_parts
            key = (What.LOSS, step.index, step.optimizer, ["the loss"], losses.size)
            return Difference(*key, losses.rounding, against, step.lines, losses)
    return None


def _compared(
    replay: Replay, step: JointStep, theirs: JointStep, floor: float
) -> Iterator[tuple[What, dict[str, float], dict[str, float]]]:
    """Yield what is compared, the tolerances, and the relative differences, by tensor."""
    limits = replay.tolerances(step, floor)
    ours, other = step.unclipped(0), theirs.unclipped(0)
    ignored = {name for model in step.ranks[0].models for name in model.ignored}  # by the wrapper
    names = [n for n in significant(ours, other) if n in limits and shown(n) not in ignored]
    yield What.GRADIENT, limits, _distances(ours, other, names)
    if any(one.clips for one in step.steps):
        ours, other = step.used(0), theirs.used(0)
        yield What.USED, limits, _distances(ours, other, names)
    twin = replay.twin(step)
    is_rounded = floor > ROUNDINGS * epsilon("float32") or bool(replay.casts(step))
    if twin is None or is_rounded or replay.in_parts or not _has_same_rates(step, theirs):
        return  # how rounding changes an update or a buffer was not measured
    known = parameters(step.ranks[0])
    before = step.before(0)
    made = [_update(one) for one in (step, theirs, twin)]
    moved = [n for n in names if all(n in one for one in made)]
    exact = {
        n: epsilon(known[n].dtype) * before[n][-1] / max(made[0][n][-1], 1e-300) for n in moved
    }
    yield What.UPDATE, *_with_noise(made, moved, exact)
    rows = [vectors(one.ranks[0], one.steps[0].buffers) for one in (step, theirs, twin)]
    own = STATISTICS  # of the batches of rank 0, as the wrapper broadcasts them
    both = [n for n in rows[0] if all(n in one for one in rows) and not n.endswith(own)]
    yield What.BUFFER, *_with_noise(rows, both, dict.fromkeys(both, epsilon("float32")))


def _has_same_rates(one: JointStep, other: JointStep) -> bool:
    """Return whether two steps have the same learning rates and momenta."""
    return repr((one.steps[0].learning_rates, one.steps[0].momenta)) == repr(
        (other.steps[0].learning_rates, other.steps[0].momenta)
    )


def _with_noise(
    values: Sequence[Vectors], names: Sequence[str], exact: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return tolerances and differences. values: of the ranks, of the replay, of its twin."""
    ours, theirs, twin = values
    noise = _distances(theirs, twin, names)
    usual = sorted(noise.values())[len(noise) // 2] if noise else 0.0
    limits = {n: NOISE_FACTOR * max(noise[n], usual, 4 * exact[n]) for n in names}
    return limits, _distances(ours, theirs, names)


def _distances(one: Vectors, two: Vectors, names: Sequence[str]) -> dict[str, float]:
    return {name: distance(one[name], two[name]) for name in names if name in one and name in two}


def _update(step: JointStep) -> Vectors:
    """Return by parameter the change that a step makes."""
    before, after = step.before(0), step.values(0)
    found: Vectors = {}
    for name in before.keys() & after.keys():
        change = after[name] - before[name]
        change[-1] = np.linalg.norm(change[:-1])
        found[name] = change
    return found
