"""The training of N ranks beside that of one process: losses, gradients, updates and buffers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

import numpy as np

from ...observe.facts.ranks import RankFacts
from ...observe.facts.steps import BackwardFacts
from .exchange import Exchange, Kind
from .relations import (
    MAX_ROUNDINGS,
    Vectors,
    distance,
    epsilon,
    fit,
    median,
    percent,
    solve,
    vectors,
)
from .replayed_steps import NOISE_FACTOR, UNMEASURED, ReplayedSteps, draws_of, significant
from .runs_facts import VerifyRuns
from .steps import JointStep, StepKey, find_step, parameters, shown

DRAWN = 0.25  # of the logarithm of N: by how much random numbers change the loss of a step
STATISTICS = ("running_mean", "running_var")
IN_TURN = " that trains the ranks' batches in turn"
VISIBLE = {"gradient": 1e-5, "clipped gradient": 1e-5, "update": 1e-3, "buffer": 1e-4}
COMBINED = 1e-3  # residual of a gradient that is a combination of those of the ranks


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
    replay: ReplayedSteps, step: JointStep, theirs: JointStep, exchange: Exchange | None
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
    joint: RankFacts, steps: Sequence[JointStep], exchanges: Mapping[StepKey, Exchange]
) -> float:
    """Return the losses of the ranks as a multiple of those of whole batches: N, 1/N, or 1.

    Random numbers differ, so only these factors can be told apart.
    """
    found = []
    for step, theirs in zip(steps, joint.steps, strict=False):
        exchange = exchanges.get(step.key)
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


def _of_replay(replay: ReplayedSteps, step: JointStep) -> float:
    # Of parts that one process trains one after the other, only the last one has gradients.
    return _sum(step.steps[0].backwards if replay.in_parts else step.backwards[0])


def _sum(backwards: list[BackwardFacts]) -> float:
    return float(sum(one.root / one.scale for one in backwards))


def _distance(one: float, two: float) -> float:
    return abs(one - two) / max(abs(one), abs(two), 1e-30)


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
        key: Key of the optimizer, and number of its steps before.
        names: The tensors that differ, the largest difference first.
        size: Largest relative difference.
        rounding: Relative difference that rounding makes in the same tensor and step.
        against: What the ranks were compared with: "one process" or "2 ranks".
        lines: The backward and the step.
        losses: The losses of the step; None if they are not known.
    """

    what: What
    key: StepKey
    names: list[str]
    size: float
    rounding: float
    against: str
    lines: list[str]
    losses: StepLosses | None = None

    @property
    def number(self) -> int:
        """Number of the step, counted from 1."""
        return self.key[1] + 1

    @property
    def name(self) -> str:
        """The tensor with the largest difference."""
        return shown(self.names[0])

    @property
    def text(self) -> str:
        """The difference as a clause."""
        of = "" if self.what is What.LOSS else f" of {self.name}"
        return (
            f"in step {self.number}, the {self.what}{of} differs by "
            f"{percent(self.size)} from that of {self.against} with the same samples (rounding: "
            f"{percent(self.rounding)})"
        )

    @property
    def sentence(self) -> str:
        """The difference as a sentence without full stop."""
        return f"{self.text[0].upper()}{self.text[1:]}"


def first_difference(
    replay: ReplayedSteps, steps: Sequence[JointStep], exchanges: Mapping[StepKey, Exchange]
) -> Difference | None:
    """Return the first difference; None if all compared steps are equal to rounding.

    exchanges: By step; each has the relative difference that it makes itself.
    """
    for step in steps:
        theirs = replay.joint(step)
        if theirs is None:
            continue
        exchange = exchanges.get(step.key)
        is_known = exchange is not None and exchange.kind is not Kind.OTHER
        floor = exchange.residual if exchange is not None and is_known else 0.0
        losses = step_losses(replay, step, theirs, exchange)
        for what, limits, values in _compared(replay, step, theirs, floor):
            off = {n: x for n, x in values.items() if x > max(limits[n], VISIBLE[what])}
            if off:
                names = sorted(off, key=lambda name: -off[name])
                return Difference(
                    *(what, step.key, names, off[names[0]]),
                    rounding=limits[names[0]] / NOISE_FACTOR,
                    against=replay.name + IN_TURN * replay.in_parts,
                    lines=step.lines,
                    losses=losses,
                )
        if losses is not None and losses.size > NOISE_FACTOR * losses.rounding:
            against = replay.name + IN_TURN * replay.in_parts
            key = (What.LOSS, step.key, ["the loss"], losses.size)
            return Difference(*key, losses.rounding, against, step.lines, losses)
    return None


def _compared(
    replay: ReplayedSteps, step: JointStep, theirs: JointStep, floor: float
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
    is_rounded = floor > MAX_ROUNDINGS * epsilon("float32") or bool(replay.casts(step))
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
    of_ranks, replayed, twin = values
    noise = _distances(replayed, twin, names)
    usual = median(noise.values())
    limits = {n: NOISE_FACTOR * max(noise[n], usual, 4 * exact[n]) for n in names}
    return limits, _distances(of_ranks, replayed, names)


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


@dataclass(frozen=True)
class Comparison:
    """What was compared with one process, and the first difference.

    Attributes:
        steps: The steps that were compared.
        difference: The first difference that is not confirmed to be meant.
        meant: Names in ``MEANT`` of differences that one process has, too, if it trains the batches
            of the ranks one after the other.
        whole: The first difference from one process that trains them as one batch.
        doubtful: A difference that may come from the number of batches that one process trains.
        reason: Why nothing was compared, as the end of a sentence; "" if something was.
        notes: What was no comparison, and why.
    """

    steps: list[JointStep] = field(default_factory=list)
    difference: Difference | None = None
    meant: list[str] = field(default_factory=list)
    whole: Difference | None = None
    doubtful: Difference | None = None
    reason: str = ""
    notes: list[str] = field(default_factory=list)


def compare(
    runs: VerifyRuns,
    steps: Sequence[JointStep],
    replay: ReplayedSteps,
    exchanges: Mapping[StepKey, Exchange],
    value_lines: Sequence[str],
) -> Comparison:
    """Compare the steps up to those in which ranks train other parts of a shortened stream.

    Args:
        runs, steps, replay: The runs, the steps of all ranks, and the replay.
        exchanges: By step, how its gradients follow from those of the ranks.
        value_lines: Lines that exchange other values than gradients in most steps. One process
            that trains the batches of the ranks in turn lacks these values.
    """
    before = list(takewhile(lambda step: step.is_at_one_place, steps))
    replayed = [step for step in before if replay.joint(step) is not None]
    whole = first_difference(replay, replayed, exchanges)
    if whole is None and replayed and replay.hides_differences(replayed[0]):
        return Comparison(reason=_UNSTEADY)
    has_norms = any(model.batch_norms for model in runs.ranks[0].models)
    if replay.in_parts:
        names = ["batch-norm"] * has_norms + ["random-numbers"] * bool(draws_of(runs.ranks))
        if whole is not None and value_lines:
            return Comparison(reason=_EXCHANGED, notes=[_no_comparison(value_lines[0])])
        if whole is not None and _may_count_batches(whole, replay, before, exchanges):
            return Comparison(doubtful=whole, reason=_COUNTED, notes=[_COUNTS])
        if whole is None and (whole := _of_joint(runs, replayed, exchanges)) is not None:
            return Comparison(replayed, whole)
        return Comparison(replayed, whole, names if whole is None and replayed else [], whole)
    cut = ReplayedSteps(runs.ranks, runs.cut, None)
    in_turn = [step for step in before if cut.joint(step) is not None]
    if whole is None or not in_turn:
        return Comparison(replayed, whole, whole=whole)
    rest = first_difference(cut, in_turn, exchanges)
    if rest is None or _may_count_batches(rest, cut, before, exchanges):
        if _depends_on_parts(whole, in_turn, replay):
            notes = [_COUNTS] if rest is not None else []
            is_padded = runs.replay is not None and runs.replay.is_collated
            names = ["batch-norm" if has_norms else "padding" if is_padded else "part-loss"]
            return Comparison(in_turn, None, names, whole, notes=notes)
    elif has_norms and value_lines:
        return Comparison(reason=_EXCHANGED, notes=[_no_comparison(value_lines[0])])
    return Comparison(replayed, rest if has_norms and rest is not None else whole, whole=whole)


def _of_joint(
    runs: VerifyRuns, steps: Sequence[JointStep], exchanges: Mapping[StepKey, Exchange]
) -> Difference | None:
    """Return a difference by the factor N between losses of the ranks and of whole batches.

    Parts that one process trains one after the other have the factor as well: the loss may be a
    sum over the samples of a rank, and ranks average.
    """
    if runs.joint is None or not steps:
        return None
    first = steps[0]
    factor = joint_factor(runs.joint, steps, exchanges)
    if factor == 1.0:
        return None
    names = list(first.names)
    size = abs(factor - 1) / max(factor, 1.0)
    found = (What.LOSS, first.key, names, size, DRAWN, "one process")
    return Difference(*found, first.lines)


def _may_count_batches(
    one: Difference,
    replay: ReplayedSteps,
    steps: Sequence[JointStep],
    exchanges: Mapping[StepKey, Exchange],
) -> bool:
    """Return whether a difference may come from a script that counts its batches.

    One process trains N times as many, and a loss may depend on their number. The first one is the
    same: then its gradient is that of rank 0, and the ranks average what they compute.
    """
    are_means = all(x.is_mean for x in exchanges.values())
    first = next((step for step in steps if step.index == 0), None)
    theirs = replay.joint(first) if first is not None else None
    if first is None or theirs is None or not are_means or len(set(first.samples)) > 1:
        return False
    at = find_step(steps, one.key) or first
    backwards = [first.backwards[0][:1], theirs.backwards[0][:1]]
    if len(set(at.samples)) > 1 or not all(backwards):
        return False
    ours, other = (
        vectors(facts, each[0].gradients, each[0].scale)
        for facts, each in zip((first.ranks[0], theirs.ranks[0]), backwards, strict=True)
    )
    names = [name for name in significant(ours, ours) if name in other]
    found = fit(other, ours, names) if names else None
    share = 1 / replay.parts
    return found is not None and found.residual <= COMBINED and abs(found.factor / share - 1) < 0.01


def _depends_on_parts(whole: Difference, steps: Sequence[JointStep], replay: ReplayedSteps) -> bool:
    """Return whether the gradient of the whole batch is no combination of those of its parts.

    Otherwise these only have other weights. The parts are the batches of each backward of a rank.
    """
    step = find_step(steps, whole.key)
    if whole.what is not What.GRADIENT or step is None:
        return False
    theirs = replay.gradients(step) or {}
    pairs = zip(step.ranks, step.backwards, strict=True)
    local = [vectors(facts, one.gradients, one.scale) for facts, each in pairs for one in each]
    names = [name for name in whole.names if all(name in each for each in (theirs, *local))]
    if not names:
        return False
    values, residual = solve(theirs, local, names)
    return values is None or residual > COMBINED


_EXCHANGED = "they exchange values in each step, and one process trained their batches in turn"
_UNSTEADY = "the same batches have other gradients when they are trained again in another order"
_COUNTED = "the loss may depend on the number of batches, and one process trained them in turn"
_COUNTS = (
    "one process that trains the batches of the ranks one after the other computes the gradient of "
    "rank 0 in the first batch, and others later: the loss may depend on the number of batches "
    "before, of which one process has more. Other ranks and steps were not compared with it"
)


def _no_comparison(line: str) -> str:
    return (
        "the gradients differ from those of one process that trains the batches of the ranks one "
        f"after the other, but the ranks exchange values in each step ({line}), which one process "
        "can't: this is no comparison"
    )
