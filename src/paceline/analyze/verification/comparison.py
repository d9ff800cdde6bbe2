"""The training of N ranks beside that of one process, and differences that are meant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from .differences import Difference, What, first_difference
from .relations import solve
from .replay import Replay, draws_of
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
        notes: What was no comparison, and why.
    """

    steps: list[JointStep] = field(default_factory=list)
    difference: Difference | None = None
    meant: list[str] = field(default_factory=list)
    whole: Difference | None = None
    notes: list[str] = field(default_factory=list)


def compare(
    runs: VerifyRuns,
    steps: Sequence[JointStep],
    replay: Replay,
    floors: Mapping[tuple[int, int], float],
    value_lines: Sequence[str],
) -> Comparison:
    """Compare the steps up to those in which ranks train other parts of a shortened stream.

    Args:
        runs, steps, replay: The runs, the steps of all ranks, and the replay.
        floors: By optimizer and step, the relative difference that the exchange itself makes.
        value_lines: Lines that exchange other values than gradients in most steps. One process
            that trains the batches of the ranks in turn lacks these values.
    """
    before = list(takewhile(lambda step: step.is_at_one_place, steps))
    replayed = [step for step in before if replay.joint(step) is not None]
    whole = first_difference(replay, replayed, floors)
    has_norms = any(model.batch_norms for model in runs.ranks[0].models)
    if replay.in_parts:
        names = ["batch-norm"] * has_norms + ["random-numbers"] * bool(draws_of(runs.ranks))
        if whole is not None and value_lines:
            return Comparison(notes=[_no_comparison(value_lines[0])])
        return Comparison(replayed, whole, names if whole is None and replayed else [], whole)
    cut = Replay(runs.ranks, runs.cut, None)
    in_turn = [step for step in before if cut.joint(step) is not None]
    if whole is None or not in_turn:
        return Comparison(replayed, whole, whole=whole)
    rest = first_difference(cut, in_turn, floors)
    if rest is None and _depends_on_parts(whole, in_turn, replay):
        return Comparison(in_turn, None, ["batch-norm" if has_norms else "part-loss"], whole)
    if rest is not None and has_norms and value_lines:
        return Comparison(notes=[_no_comparison(value_lines[0])])
    return Comparison(replayed, rest if has_norms and rest is not None else whole, whole=whole)


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


def _no_comparison(line: str) -> str:
    return (
        "the gradients differ from those of one process that trains the batches of the ranks one "
        f"after the other, but the ranks exchange values in each step ({line}), which one process "
        "can't: this is no comparison"
    )
