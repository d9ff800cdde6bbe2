"""Evaluate on one rank what several ranks have evaluated: each sample once.

A replay joins the batches of the ranks that have the same place in a pass. Samples that several
ranks evaluate, or that a sampler has added, are left out after the first time, as one process has
them only once. Another replay evaluates the script's own batches: a value that depends on how
samples are cut into batches differs then.
"""

import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from ...record.hooks.batch_size import samples_in
from ...record.hooks.taps import LOADER_LENGTH, Function
from ..facts.ranks import RankFacts
from ..facts.samples import BatchFacts, LoaderFacts, Phase
from ..facts_file import read_facts
from ..samples.contents import length_of
from ..samples.loaders import Loaders, dataset_of
from .joined_batches import has_rows, join_batches, select_samples
from .stored_run import batch_path, load_batch

Key = tuple[int, tuple[int, ...]]  # of a sample: its position in the dataset, and its contents


class Evaluations:
    """The evaluations of a stored run.

    Args:
        folder: Folder of the stored run.
        ranks: Ranks of the stored run that this process stands for.
        loaders: Know where loaders were made.
        joins: Whether batches are joined; else the script's own batches are evaluated.
    """

    def __init__(self, folder: Path, ranks: list[int], loaders: Loaders, joins: bool) -> None:
        self._folder, self._numbers, self._loaders = folder, ranks, loaders
        self.joins = joins
        self._joined: dict[tuple[int, int], list[Any] | None] = {}

    @cached_property
    def ranks(self) -> list[RankFacts]:
        """The facts of the ranks that this process stands for."""
        return [read_facts(self._folder, rank) for rank in self._numbers]

    def install(self) -> None:
        """Let a loader have as many batches as it had on each of the ranks.

        Scripts divide sums of losses by this number.
        """

        def len_of(length: Function, loader: Any) -> int:
            found = self._length_on_ranks(loader)
            return int(length(loader)) if found is None else found

        LOADER_LENGTH.around(len_of)

    def _length_on_ranks(self, loader: Any) -> int | None:
        """Return the number of batches of a rank's pass; None if it is not known."""
        stored = self._stored(loader)
        if stored is None or any(
            one.phase is not Phase.TRAINING and self.batches(stored.key, one.number) is None
            for one in stored.passes
        ):
            return None
        lengths = {len(one.planned) for one in stored.passes if one.planned is not None}
        return lengths.pop() if len(lengths) == 1 else None

    def _stored(self, loader: Any) -> LoaderFacts | None:
        """Return the facts of the same loader on the ranks; None if it is not known.

        A line can make several loaders (``accelerator.prepare``). Before its first pass, a loader
        is told from the others by the number of samples.
        """
        stored = self.ranks[0].loaders
        own = self._loaders.keys.get(loader)
        if own is not None:
            return next((one for one in stored if one.key == own.key), None)
        line, samples = self._loaders.line_of(loader), length_of(dataset_of(loader))
        known = [x for x in stored if line and (x.line, x.dataset_length) == (line, samples)]
        return known[0] if len(known) == 1 else None

    def batches(self, key: int, number: int) -> list[Any] | None:
        """Return the joined batches of a pass; None if they are not stored, or can't be joined.

        Args:
            key: Of the loader.
            number: Of the pass.
        """
        if not self.joins:
            return None
        if (key, number) not in self._joined:
            try:
                self._joined[key, number] = self._join(key, number)
            except (ValueError, OSError):
                self._joined[key, number] = None
        return self._joined[key, number]

    def _join(self, key: int, number: int) -> list[Any] | None:
        parts: list[list[tuple[Any, list[Key]]]] = []  # by rank: batches, and keys of their samples
        of_rows = True
        for rank, facts in zip(self._numbers, self.ranks, strict=True):
            loader = next((one for one in facts.loaders if one.key == key), None)
            if loader is None or number >= len(loader.passes):
                continue
            if loader.line != self.ranks[0].loaders[key].line:
                return None
            every = [x for x in facts.batches if (x.loader, x.pass_number) == (key, number)]
            if len(every) != loader.passes[number].batches:
                return None
            keys = [_keys(one, loader) for one in every]
            if keys and keys in [[each for _, each in one] for one in parts]:
                continue  # all samples, also without positions
            paths = [batch_path(self._folder, (key, number, x.number), rank) for x in every]
            batches = [load_batch(path)[0] for path in paths]
            of_rows &= all(has_rows(a, b.indices) for a, b in zip(batches, every, strict=True))
            parts.append(list(zip(batches, keys, strict=True)))
        if len(parts) > 1 and not of_rows:
            return None  # such as graphs, whose numbers are those within a batch
        seen: set[Key] = set()
        found = []
        for at in range(max(map(len, parts), default=0)):
            batch = _once([one[at] for one in parts if at < len(one)], seen)
            if batch is not None:
                found.append(batch)
        return found


def keep_all_results(loader: Any) -> None:
    """Let accelerate's ``gather_for_metrics`` remove no results of the batches of a loader.

    It removes those of samples that its sampler repeats in the last batch, counted in batches of
    the script. Joined batches have each sample once.
    """
    state: Any = sys.modules.get("accelerate.state")
    active: Any = state.GradientState().active_dataloader if state is not None else None
    if loader is not None and getattr(active, "base_dataloader", None) is loader:
        active.remainder = 0


def _keys(batch: BatchFacts, loader: LoaderFacts) -> list[Key]:
    """Return a key of each sample; [] if samples can't be told apart."""
    contents = [*zip(*batch.contents, strict=True)] or [()] * batch.samples
    positions = batch.indices
    if positions is None or len(positions) != batch.samples or len(contents) != batch.samples:
        return [(-1, one) for one in contents] if batch.contents else []
    if loader.subset is not None:
        positions = [loader.subset[at] for at in positions]
    return list(zip(positions, contents, strict=True))


def _once(parts: list[tuple[Any, list[Key]]], seen: set[Key]) -> Any:
    """Join batches without the samples that were seen; None if none is left."""
    kept = []
    for batch, keys in parts:
        rows = []
        for row, key in enumerate(keys):
            if key not in seen or key[0] < 0:
                rows.append(row)
                seen.add(key)
        if not keys or len(rows) == len(keys):
            kept.append(batch)
        elif rows:
            kept.append(select_samples(batch, rows))
    kept = [one for one in kept if samples_in(one)]
    return join_batches(kept) if kept else None
