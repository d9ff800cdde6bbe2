"""The training of N ranks beside that of one process, and differences that are meant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from .differences import Difference, What, first_difference
from .exchange import Exchange
from .losses import DRAWN, joint_factor
from .relations import fit, solve, vectors
from .replay import Replay, draws_of, significant
from .runs_facts import VerifyRuns
from .steps import JointStep

COMBINED = 1e-3  # residual of a gradient that is a combination of those of the ranks


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
    replay: Replay,
    exchanges: Sequence[Exchange],
    value_lines: Sequence[str],
) -> Comparison:
    """Compare the steps up to those in which ranks train other parts of a shortened stream.

    Args:
        runs, steps, replay: The runs, the steps of all ranks, and the replay.
        exchanges: How the gradients of the steps follow from those of the ranks.
        value_lines: Lines that exchange other values than gradients in most steps. One process
            that trains the batches of the ranks in turn lacks these values.
    """
    by_step = {(one.step.optimizer, one.step.index): one for one in exchanges}
    before = list(takewhile(lambda step: step.is_at_one_place, steps))
    replayed = [step for step in before if replay.joint(step) is not None]
    whole = first_difference(replay, replayed, by_step)
    has_norms = any(model.batch_norms for model in runs.ranks[0].models)
    if replay.in_parts:
        names = ["batch-norm"] * has_norms + ["random-numbers"] * bool(draws_of(runs.ranks))
        if whole is not None and value_lines:
            return Comparison(reason=_EXCHANGED, notes=[_no_comparison(value_lines[0])])
        if whole is not None and _may_count_batches(whole, replay, before, exchanges):
            return Comparison(doubtful=whole, reason=_COUNTED, notes=[_COUNTS])
        if whole is None and (whole := _of_joint(runs, replayed, by_step)) is not None:
            return Comparison(replayed, whole)
        return Comparison(replayed, whole, names if whole is None and replayed else [], whole)
    cut = Replay(runs.ranks, runs.cut, None)
    in_turn = [step for step in before if cut.joint(step) is not None]
    if whole is None or not in_turn:
        return Comparison(replayed, whole, whole=whole)
    rest = first_difference(cut, in_turn, by_step)
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
    runs: VerifyRuns, steps: Sequence[JointStep], exchanges: Mapping[tuple[int, int], Exchange]
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
    found = (What.LOSS, first.index, first.optimizer, names, size, DRAWN, "one process")
    return Difference(*found, first.lines)


def _may_count_batches(
    one: Difference, replay: Replay, steps: Sequence[JointStep], exchanges: Sequence[Exchange]
) -> bool:
    """Return whether a difference may come from a script that counts its batches.

    One process trains N times as many, and a loss may depend on their number. The first one is the
    same: then its gradient is that of rank 0, and the ranks average what they compute.
    """
    are_means = all(x.is_mean for x in exchanges)
    first = next((step for step in steps if step.index == 0), None)
    theirs = replay.joint(first) if first is not None else None
    if first is None or theirs is None or not are_means or len(set(first.samples)) > 1:
        return False
    at = next((x for x in steps if (x.optimizer, x.index) == (one.optimizer, one.index)), first)
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


def _depends_on_parts(whole: Difference, steps: Sequence[JointStep], replay: Replay) -> bool:
    """Return whether the gradient of the whole batch is no combination of those of the ranks.

    Otherwise the ranks' gradients only have other weights.
    """
    step = next(
        (x for x in steps if (x.optimizer, x.index) == (whole.optimizer, whole.index)), None
    )
    if whole.what is not What.GRADIENT or step is None:
        return False
    theirs = replay.gradients(step) or {}
    local = [step.local(rank, len(step.backwards[rank])) for rank in range(step.size)]
    names = [name for name in whole.names if all(name in each for each in (theirs, *local))]
    if not names:
        return False
    values, residual = solve(theirs, local, names)
    return values is None or residual > COMBINED


_EXCHANGED = "they exchange values in each step, and one process trained their batches in turn"
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
