"""The steps of an optimizer on all ranks, with the gradients that belong together."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ...observe.facts.models import ParameterFacts
from ...observe.facts.ranks import RankFacts
from ...observe.facts.steps import BackwardFacts, StepFacts
from .relations import Vectors, add, vectors

StepKey = tuple[int, int]  # key of the optimizer, and number of its steps before
Step = TypeVar("Step", StepFacts, "JointStep")


def find_step(steps: Iterable[Step], key: StepKey) -> Step | None:
    """Return the step with a key; None if there is none."""
    return next((step for step in steps if step.key == key), None)


@dataclass(frozen=True)
class JointStep:
    """A step of an optimizer on all ranks.

    Attributes:
        optimizer: Key of the optimizer.
        index: Number of its steps before.
        ranks: Facts of all ranks.
        steps: The step on each rank.
    """

    optimizer: int
    index: int
    ranks: Sequence[RankFacts]
    steps: list[StepFacts]

    @property
    def key(self) -> StepKey:
        """Key of the optimizer, and number of its steps before."""
        return self.optimizer, self.index

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def backwards(self) -> list[list[BackwardFacts]]:
        """Of each rank, the backwards that computed gradients of parameters of this step."""
        return [
            [one for one in step.backwards if one.gradients.keys() & step.gradients.keys()]
            for step in self.steps
        ]

    @cached_property
    def samples(self) -> list[int]:
        """Number of samples of each rank in this step; 0 if it is not known."""
        return [
            sum(facts.batches[at].used for at in trained_by(facts, backwards))
            for facts, backwards in zip(self.ranks, self.backwards, strict=True)
        ]

    @cached_property
    def contents(self) -> Counter[tuple[int, ...]]:
        """The samples of all ranks in this step, by their contents."""
        return Counter(
            sample
            for facts, backwards in zip(self.ranks, self.backwards, strict=True)
            for at in trained_by(facts, backwards)
            for sample in facts.batches[at].by_sample
        )

    @cached_property
    def names(self) -> list[str]:
        """Parameters whose gradients are known on all ranks, before and after the exchange."""
        known: set[str] | None = None
        for step, backwards in zip(self.steps, self.backwards, strict=True):
            local = {name for one in backwards for name in one.gradients}
            here = local & step.gradients.keys()
            known = here if known is None else known & here
        return [name for name in self.steps[0].gradients if name in (known or set())]

    @cached_property
    def sharded(self) -> dict[str, float]:
        """Parameters of which each rank holds a part, with the number of copies on all ranks."""
        held: dict[str, int] = {}
        for facts in self.ranks:
            for name, one in parameters(facts).items():
                held[name] = held.get(name, 0) + one.shard_numel
        return {
            name: max(held[name] / numel(one.shape), 1.0)
            for name, one in parameters(self.ranks[0]).items()
            if held[name] < len(self.ranks) * numel(one.shape)
        }

    def local(self, rank: int, last: int) -> Vectors:
        """Return the sum of the gradients that a rank computed in the last backwards of the step.

        The scale of a gradient scaler is divided out.
        """
        chosen = self.backwards[rank][-last:]
        facts = self.ranks[rank]
        terms = [vectors(facts, one.gradients, one.scale) for one in chosen]
        total = add(terms)
        return {name: total[name] for name in self.names if name in total}

    def used(self, rank: int) -> Vectors:
        """Return the gradients that the optimizer used on a rank; whole ones of sharded ones."""
        return self._whole(rank, [step.gradients for step in self.steps])

    def before(self, rank: int) -> Vectors:
        """Return the parameters of a rank before the step; whole ones of sharded ones."""
        return self._whole(rank, [step.before for step in self.steps])

    def values(self, rank: int) -> Vectors:
        """Return the parameters of a rank after the step; whole ones of sharded ones."""
        return self._whole(rank, [step.parameters for step in self.steps])

    def unclipped(self, rank: int) -> Vectors:
        """Return the gradients before the first clipping; those used where nothing was clipped."""
        rows = []
        for step in self.steps:
            first = dict(step.gradients)
            for clip in reversed(step.clips):
                first |= {name: at for name, at in clip.gradients.items() if name in first}
            rows.append(first)
        return self._whole(rank, rows)

    def _whole(self, rank: int, rows: Sequence[Mapping[str, int]]) -> Vectors:
        one = vectors(self.ranks[rank], rows[rank])
        if self.sharded:
            total = add([vectors(*each) for each in zip(self.ranks, rows, strict=True)])
            parts = {name: total[name] for name in self.sharded if name in one}
            one |= {name: part / self.sharded[name] for name, part in parts.items()}
        return one

    @property
    def is_at_one_place(self) -> bool:
        """Whether the ranks' batches have the same position in a pass that was shortened."""
        places = []
        for facts, backwards in zip(self.ranks, self.backwards, strict=True):
            skipped = {
                (loader.key, one_pass.number): one_pass.skipped
                for loader in facts.loaders
                for one_pass in loader.passes
            }
            batches = [facts.batches[at] for at in sorted(trained_by(facts, backwards))]
            places.append([skipped.get(b.pass_key, 0) for b in batches])
        return all(place == places[0] for place in places)

    @property
    def lines(self) -> list[str]:
        """The lines of the last backward and of the step."""
        backwards = self.backwards[0]
        found = [backwards[-1].line] if backwards else []
        return [line for line in [*found, self.steps[0].line] if line]


def trained(facts: RankFacts, backward: BackwardFacts) -> list[int]:
    """Return the numbers of a backward's batches without those that were only evaluated."""
    return facts.without_evaluated(backward.batches)


def trained_by(facts: RankFacts, backwards: Sequence[BackwardFacts]) -> set[int]:
    """Return the numbers of the batches that backwards train; several may train the same one."""
    return {at for one in backwards for at in trained(facts, one)}


def numel(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)


def parameters(facts: RankFacts) -> dict[str, ParameterFacts]:
    """Return parameters by the name that rows use: alone, and after "MODEL KEY/"."""
    found: dict[str, ParameterFacts] = {}
    for model in facts.models:
        for one in model.parameters:
            found.setdefault(one.name, one)
            found[f"{model.key}/{one.name}"] = one
    return found


def misaligned(ranks: Sequence[RankFacts]) -> dict[int, int]:
    """Return by optimizer the first step before which ranks ran different numbers of backwards."""
    counts: list[dict[StepKey, int]] = []
    for facts in ranks:
        total: Counter[int] = Counter()
        counts.append({})
        for step in facts.steps:
            total[step.optimizer] += len(step.backwards)
            counts[-1][step.key] = total[step.optimizer]
    found: dict[int, int] = {}
    for (optimizer, index), count in counts[0].items():
        if any(one.get((optimizer, index), count) != count for one in counts[1:]):
            found.setdefault(optimizer, index)
    return found


def joint_steps(ranks: Sequence[RankFacts]) -> Iterator[JointStep]:
    """Yield the steps that all ranks made, in the order of rank 0. Skipped ones are left out."""
    if not ranks:
        return
    by_rank = [{step.key: step for step in one.steps} for one in ranks]
    apart = misaligned(ranks)
    for step in ranks[0].steps:
        if step.index >= apart.get(step.optimizer, step.index + 1):
            continue
        steps = [one[step.key] for one in by_rank if step.key in one]
        if len(steps) == len(ranks) and not any(one.is_skipped for one in steps):
            yield JointStep(step.optimizer, step.index, ranks, steps)


def usual_backwards(steps: Sequence[JointStep]) -> int:
    """Return the number of backwards of most steps, also of those that add nothing to it."""
    counts = Counter(len(one.backwards) for step in steps for one in step.steps)
    return counts.most_common(1)[0][0] if counts else 1


def shown(name: str) -> str:
    """Return a parameter's name without the key of its model."""
    if name.startswith("?"):
        return f"parameter {int(name.rpartition('.')[2]) + 1} of the optimizer (of no module)"
    head, slash, rest = name.partition("/")
    return rest if slash and head.isdigit() else name
