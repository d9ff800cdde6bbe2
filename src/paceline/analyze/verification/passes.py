"""The passes of a loader on all ranks, with samples that can be compared between ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from ...observe.facts.ranks import RankFacts
from ...observe.facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase

KNOWN_SAMPLERS = {
    *("DistributedSampler", "RandomSampler", "SequentialSampler", "BatchSampler"),
    *("SubsetRandomSampler", "WeightedRandomSampler"),
}
PLAIN_DATASETS = {"TensorDataset"}  # whose samples depend on their position only
Sample = int | tuple[int, ...]  # index in a dataset that all ranks share, or checksums of contents
DISTINCT = 0.5  # of the samples of a batch that must differ before contents identify them
LEAST_SAMPLES = 4  # compared, before ranks are said to have the same, or an order to be random
MIN_PERIOD = 3  # batches of an epoch; fewer do not show an order
CHOOSING = ("weighted", "subset", "balanced", "imbalanced", "curriculum")  # samplers that leave out


@dataclass(frozen=True)
class RankPass:
    """A pass of one rank.

    Attributes:
        loader: The loader.
        facts: The pass.
        batches: The batches that were read.
    """

    loader: LoaderFacts
    facts: PassFacts
    batches: list[BatchFacts]

    @property
    def planned(self) -> list[int] | None:
        """The indices of all samples in order, also of those that were not read; None: unknown."""
        planned = self.facts.planned
        return None if planned is None else [*chain.from_iterable(planned)]

    @property
    def is_whole(self) -> bool:
        """Whether all samples of the pass were read."""
        return self.facts.is_complete or (self.facts.is_read and not self.facts.skipped)


@dataclass
class JointPass:
    """A pass on all ranks that made it.

    Attributes:
        number: Position among the passes of its stream.
        ranks: By rank.
    """

    number: int
    ranks: dict[int, RankPass] = field(default_factory=dict)

    @property
    def first(self) -> RankPass:
        """That of the first rank."""
        return self.ranks[min(self.ranks)]


@dataclass
class Stream:
    """Passes over the same data, also if the script makes a new loader for each.

    Attributes:
        phase: What the training does with the batches.
        passes: In order.
        size: Number of ranks of the training.
    """

    phase: Phase
    size: int
    passes: list[JointPass] = field(default_factory=list)

    @property
    def first(self) -> RankPass:
        """The first pass of the first rank that made one."""
        return self.passes[0].first

    @property
    def loaders(self) -> dict[int, LoaderFacts]:
        """The first loader of each rank."""
        return {rank: one.loader for rank, one in self.passes[0].ranks.items()}

    @property
    def lines(self) -> list[str]:
        """Where the sampler is defined, the loader was made, and where it is iterated.

        The line that iterates comes before the loader's if the sampler is the user's.
        """
        loader, loop = self.first.loader, self.first.facts.line
        lines = [loader.sampler_line, loader.line, loop]
        if loader.sampler and loader.sampler not in KNOWN_SAMPLERS:
            lines = [loader.sampler_line, loop, loader.line]
        return [line for line in lines if line]

    @cached_property
    def shares_dataset(self) -> bool:
        """Whether equal positions mean equal samples on all ranks, as far as that is known."""
        loaders = list(self.loaders.values())
        if any(one.is_iterable or one.dataset_length is None for one in loaders):
            return False
        known = {(one.dataset, one.dataset_length, _checksum(one)) for one in loaders}
        if len(known) > 1:
            return False
        if _checksum(loaders[0]) == 0:
            return self._same_contents()
        return loaders[0].dataset in PLAIN_DATASETS or not self._are_contradicted()

    @cached_property
    def has_root(self) -> bool:
        """Whether the loaders are parts of one dataset, and it is known which."""
        loaders = list(self.loaders.values())
        known = {(one.root_length, one.root_checksum) for one in loaders}
        return (
            len(known) == 1
            and loaders[0].root_length is not None
            and loaders[0].root_checksum != 0
            and any(one.subset is not None for one in loaders)
        )

    def samples(self, batch: BatchFacts, loader: LoaderFacts) -> list[Sample] | None:
        """Return the samples of a batch so that equal ones are equal on all ranks, or None."""
        if batch.indices is not None and (self.has_root or self.shares_dataset):
            return [*self._positions(batch.indices, loader)]
        return [*batch.by_sample] if batch.contents else None

    def read(self, made: RankPass) -> list[Sample]:
        """Return the samples of all batches of a pass that were read, as far as they are known."""
        samples = (self.samples(batch, made.loader) or [] for batch in made.batches)
        return [*chain.from_iterable(samples)]

    def plan(self, made: RankPass) -> list[int] | None:
        """Return the samples of all batches of a pass in order, or None.

        Numbers are comparable between ranks if ``has_root`` or ``shares_dataset``.
        """
        return None if made.planned is None else self._positions(made.planned, made.loader)

    def plans(self, one: JointPass) -> dict[int, list[int]]:
        """Return the samples of a pass by rank; empty unless those of all ranks are known."""
        plans = {rank: self.plan(made) for rank, made in one.ranks.items()}
        found = {rank: plan for rank, plan in plans.items() if plan is not None}
        return found if len(found) == len(plans) and any(found.values()) else {}

    def order(self, made: RankPass) -> list[Sample]:
        """Return the samples of a pass in order: the planned ones, else those that were read.

        Samples of a stream are known by their contents, if these differ.
        """
        if made.loader.is_iterable:
            read = self.read(made)
            return read if len(set(read)) >= max(DISTINCT * len(read), LEAST_SAMPLES) else []
        if made.planned is not None:
            return [*made.planned]
        is_known = all(batch.indices is not None for batch in made.batches)
        return [at for batch in made.batches for at in batch.indices or []] if is_known else []

    def until_again(self, rank: int, batches: Sequence[BatchFacts]) -> list[Sample]:
        """Return the samples of a rank's first batches until one occurs again; [] if none does.

        Empty also if there are fewer batches than an epoch has at least.
        """
        seen: dict[Sample, None] = {}
        for number, batch in enumerate(batches):
            samples = self.samples(batch, self.loaders[rank]) or []
            if any(one in seen for one in samples):
                return list(seen) if number >= MIN_PERIOD else []
            seen.update(dict.fromkeys(samples))
        return []

    @property
    def is_shuffled(self) -> bool:
        """Whether the epochs have different random orders."""
        orders = [self.order(one.first) for one in self.passes]
        are_random = all(order and not is_regular(order) for order in orders)
        return are_random and any(order != orders[0] for order in orders)

    @property
    def chooses(self) -> bool:
        """Whether the sampler leaves out or repeats samples on purpose, by its name."""
        return any(word in self.first.loader.sampler.lower() for word in CHOOSING)

    @property
    def padding(self) -> int:
        """How many samples a sampler may repeat, or leave out, to give ranks equal parts."""
        batch = self.first.loader.batch_size or max(
            (one.samples for one in self.first.batches), default=1
        )
        return self.size * batch - 1

    @cached_property
    def is_by_rank(self) -> bool:
        """Whether each rank has its own part of the dataset."""
        parts = [tuple(one.subset or ()) for one in self.loaders.values()]
        return len(set(parts)) == len(parts) > 1

    def _positions(self, indices: Sequence[int], loader: LoaderFacts) -> list[int]:
        if self.has_root and loader.subset is not None:
            return [loader.subset[at] if 0 <= at < len(loader.subset) else at for at in indices]
        return list(indices)

    @cached_property
    def divides_batches(self) -> bool:
        """Whether all ranks read the same batches, and each trains another part of them."""
        parts: dict[tuple[int, int], list[set[int]]] = {}
        for one in self.passes:
            for of_rank in one.ranks.values():
                for batch in of_rank.batches:
                    parts.setdefault((one.number, batch.number), []).append(set(batch.rows))
        return all(
            len(rows) == self.size > 1
            and all(rows)
            and sum(map(len, rows)) == len(set().union(*rows))
            for rows in parts.values()
        )

    def _same_contents(self) -> bool:
        """Return whether samples with the same position were seen to have the same contents."""
        pairs = list(self._contents_of_two_ranks())
        return all(a == b for a, b in pairs) if pairs else self.is_split_by_sampler()

    def _are_contradicted(self) -> bool:
        """Return whether equal positions of equal datasets have other contents on other ranks.

        Augmentation changes inputs, and not labels: one column with several values suffices.
        """
        pairs = list(self._contents_of_two_ranks())
        columns = range(min((len(one) for pair in pairs for one in pair), default=0))
        agreeing = [n for n in columns if all(a[n] == b[n] for a, b in pairs)]
        return bool(pairs) and not any(len({a[n] for a, _ in pairs}) > 1 for n in agreeing)

    def _contents_of_two_ranks(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield the contents of samples that two ranks read at the same position."""
        for each in self.contents_by_position().values():
            first, content = each[0]
            yield from ((content, other) for rank, other in each[1:] if rank != first)

    def contents_by_position(self) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
        """Return rank and contents of each time that a position of the dataset was read."""
        seen: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for one in self.passes:
            for rank, of_rank in one.ranks.items():
                for batch in of_rank.batches:
                    for at, content in zip(batch.indices or [], batch.by_sample, strict=False):
                        seen.setdefault(at, []).append((rank, content))
        return seen

    def is_split_by_sampler(self) -> bool:
        """Return whether no position occurs on two ranks: then all index one dataset."""
        plans = [of_rank.planned for of_rank in self.passes[0].ranks.values()]
        positions = [set(plan) for plan in plans if plan is not None]
        is_known = len(positions) == len(plans) > 1
        return is_known and len(set().union(*positions)) == sum(map(len, positions))


def is_regular(order: Sequence[Any]) -> bool:
    """Return whether an order is not random: it goes up, but for a return to the start."""
    if len(order) < LEAST_SAMPLES:
        return True
    falls = sum(bool(after <= before) for before, after in pairwise(order))
    return falls <= max(1, len(order) // 20)


def _checksum(loader: LoaderFacts) -> int:
    """Return a checksum of the dataset; 0 if it is not known."""
    return loader.dataset_checksum or (loader.root_checksum if loader.subset is None else 0)


def streams(ranks: Sequence[RankFacts], phase: Phase) -> list[Stream]:
    """Return the streams of a phase. Passes without batches are left out."""
    found: dict[tuple[str, str, int], Stream] = {}
    for facts in ranks:
        for key, made in _passes(facts, phase):
            stream = found.setdefault(key, Stream(phase, len(ranks)))
            number = sum(facts.rank in one.ranks for one in stream.passes)
            if number == len(stream.passes):
                stream.passes.append(JointPass(number))
            stream.passes[number].ranks[facts.rank] = made
    return list(found.values())


def _passes(facts: RankFacts, phase: Phase) -> Iterator[tuple[tuple[str, str, int], RankPass]]:
    """Yield the passes of a rank with the key of their stream: line, dataset, which of several."""
    datasets: dict[tuple[str, str], list[tuple[int, int | None]]] = {}
    batches: dict[tuple[int, int], list[BatchFacts]] = {}
    for batch in facts.batches:
        batches.setdefault(batch.pass_key, []).append(batch)
    for loader in facts.loaders:
        for one in loader.passes:
            read = batches.get((loader.key, one.number), [])
            if one.phase is not phase or not read:
                continue
            known = datasets.setdefault((loader.line, loader.dataset), [])
            identity = (loader.dataset_checksum, loader.dataset_length)
            if identity not in known:
                known.append(identity)
            yield (
                (loader.line, loader.dataset, known.index(identity)),
                RankPass(loader, one, read),
            )
