"""Does the unchanged script on one rank train the global batches of N ranks?

It does if it divides a global batch by the number of ranks. Then it is the one process with which
the gradients are compared, also if the script reads no loader that could be replayed.
"""

from collections import Counter
from collections.abc import Sequence

from ...record.training.facts.ranks import RankFacts
from ...record.training.facts.steps import StepFacts
from .relations import distance
from .steps import joint_steps, trained_by

LEAST_STEPS = 2
SAME = 1e-6  # relative difference of equal parameters


def trains_same_batches(ranks: Sequence[RankFacts], alone: RankFacts) -> bool:
    """Return whether one rank begins with the same parameters and trains the same samples."""
    steps = [one.steps[:LEAST_STEPS] for one in (*ranks, alone)]
    if any(len(one) < LEAST_STEPS for one in steps) or not _start_equal(ranks, alone):
        return False
    for number, theirs in enumerate(steps[-1]):
        counts = [_samples(f, one[number]) for f, one in zip(ranks, steps, strict=False)]
        whole = sum(counts, Counter())
        if not whole or whole != _samples(alone, theirs):
            return False
    return True


def _samples(facts: RankFacts, step: StepFacts) -> Counter[tuple[int, ...]]:
    """Return the contents of the samples that a step trains."""
    return Counter(
        sample
        for at in trained_by(facts, step.backwards)
        for sample in zip(*facts.batches[at].contents, strict=True)
    )


def _start_equal(ranks: Sequence[RankFacts], alone: RankFacts) -> bool:
    """Return whether the parameters before the first step are equal."""
    first, other = next(joint_steps(ranks), None), next(joint_steps([alone]), None)
    if first is None or other is None:
        return False
    ours, theirs = first.before(0), other.before(0)
    are_same = bool(ours) and ours.keys() == theirs.keys()
    return are_same and all(distance(ours[name], theirs[name]) <= SAME for name in ours)
