"""Does the unchanged script on one rank train the global batches of N ranks?

It does if it divides a global batch by the number of ranks. Then it is the one process with which
the gradients are compared, also if the script reads no loader that could be replayed.
"""

from collections import Counter
from collections.abc import Sequence

from ...record.training.facts.ranks import RankFacts
from ...record.training.facts.steps import StepFacts
from .relations import distance, vectors
from .steps import trained

LEAST_STEPS = 2
SAME = 1e-6  # relative difference of equal parameters


def trains_same_batches(ranks: Sequence[RankFacts], alone: RankFacts) -> bool:
    """Return whether one rank begins with the same parameters and trains the same samples."""
    steps = [one.steps[:LEAST_STEPS] for one in (*ranks, alone)]
    if any(len(one) < LEAST_STEPS for one in steps) or not _start_equal(ranks[0], alone):
        return False
    for number, theirs in enumerate(steps[-1]):
        counts = [_samples(f, one[number]) for f, one in zip(ranks, steps, strict=False)]
        whole = sum(counts, Counter())
        if not whole or whole != _samples(alone, theirs):
            return False
    return True


def _samples(facts: RankFacts, step: StepFacts) -> Counter[tuple[int, ...]]:
    """Return the contents of the samples that a step trains."""
    numbers = {at for one in step.backwards for at in trained(facts, one)}
    return Counter(
        sample for at in numbers for sample in zip(*facts.batches[at].contents, strict=True)
    )


def _start_equal(ours: RankFacts, theirs: RankFacts) -> bool:
    models = [one for one in ours.models if one.first and not one.is_sharded]
    others = {(one.key, one.class_name): one for one in theirs.models}
    for model in models:
        other = others.get((model.key, model.class_name))
        if other is None or other.first.keys() != model.first.keys():
            return False
        one, two = vectors(ours, model.first), vectors(theirs, other.first)
        if any(distance(one[name], two[name]) > SAME for name in one):
            return False
    return bool(models)
