"""Observe the passes and batches of DataLoaders, and shorten passes where that is safe."""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, Subset
from torch.utils.weak import WeakIdKeyDictionary

from ...record.hooks import taps
from ...record.hooks.batch_size import samples_in
from ...record.hooks.taps import Function, Tap
from ..facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from ..generators import kept_generators
from ..observation import Observation
from ..user_lines import is_in_loop, is_read_ahead, user_line
from .contents import describe_dataset, length_of, sample_checksums
from .sampler_lines import lines_of_sampler, stream_lines


def sampler_of(loader: Any) -> Any:
    """Return the sampler of a loader that orders samples, also inside of batch samplers."""
    sampler, outer = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    found: Any = outer
    while hasattr(found, "batch_sampler"):
        found = found.batch_sampler  # as in accelerate's
    inside = getattr(found, "sampler", None)
    if outer is None or inside is sampler:
        return sampler
    return inside if inside is not None else found


def dataset_of(loader: Any) -> Any:
    """Return the user's dataset."""
    dataset = loader.dataset
    is_ours = type(dataset).__module__.startswith("paceline.")
    return getattr(dataset, "dataset", dataset) if is_ours else dataset  # a Loader's wraps none


def listed(index: Any) -> list[int]:
    """Return the indices of a batch as a list, whatever the sampler returns."""
    if hasattr(index, "tolist"):
        index = index.tolist()
    return [_index_number(one) for one in (index if isinstance(index, list | tuple) else [index])]


def _index_number(index: Any) -> int:
    """Return an index as a number; a checksum of other keys."""
    if isinstance(index, tuple) and len(index) == 2 and all(type(x) is int for x in index):
        return int(index[1])  # world.shard: with the epoch
    try:
        return int(index)
    except (TypeError, ValueError):
        return zlib.crc32(repr(index).encode())


def known(indices: list[list[int] | None]) -> list[list[int]]:
    return [one for one in indices if one is not None]


@dataclass
class OpenPass:
    """A pass that is not over.

    Attributes:
        loader, facts: The loader's facts, and those of the pass.
        source: The loader.
        indices: Indices of each batch that was requested so far; None: not known.
        returned: Number of batches that were returned.
        is_short: Whether the pass may be shortened.
        is_stopped: Whether it was.
        is_at_end: Whether the batch that was returned last is known to be the last one.
        samples: Number of samples of the batch that is returned next, if it is known.
    """

    loader: LoaderFacts
    facts: PassFacts
    source: Any
    indices: list[list[int] | None] = field(default_factory=list)
    returned: int = 0
    is_short: bool | None = None
    is_stopped: bool = False
    is_at_end: bool = False
    samples: int | None = None
    first_group: int = 0  # batches of the first step of the pass
    planned: list[list[int]] | None = None
    ahead: int | None = None  # a batch that a library has read, but not passed on yet
    rest: list[Any] = field(default_factory=list)  # indices that were taken from the sampler before
    sampler: Any = None  # the iterator over the rest of the batches' indices


_HOOK, _BATCH = "the DataLoader", "a batch of the DataLoader"
MAX_PLANNED = 1 << 18  # samples of the rest of a pass; more are not listed
MAX_GROUP = 64  # batches until the first step: a longer accumulation is not waited for
MAX_WHOLE = 5  # times as many batches as are read at least: a pass that is run to its end
MAX_SKIPPED = 1024  # batches of a stream that are read to find its end
SKIPPING_S = 4.0  # of all streams


class Loaders:
    """The loaders of this process.

    Args:
        observation: Receives the facts.
        end: Ends the run; it does not return.
    """

    def __init__(self, observation: Observation, end: Callable[[], None]) -> None:
        self._observation, self._end = observation, end
        self.keys: WeakIdKeyDictionary = WeakIdKeyDictionary()  # facts by loader
        self._lines: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._splits: WeakIdKeyDictionary = WeakIdKeyDictionary()  # lines, by subset
        self._passes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # OpenPass by iterator
        self._open: list[OpenPass] = []  # whose indices are not all known
        self.opening: OpenPass | None = None
        self.last: OpenPass | None = None  # whose batch was returned last
        self.has_batches = False  # whether any loader has returned one
        self.ended_at_step: int | None = None  # of the last training pass; None if another began
        self.fetching: OpenPass | None = None  # also in the workers that are started for it
        self._fetches = False
        self._skipped_s = 0.0  # in which streams were read to their ends
        # Returns the iterator of a training pass in a replay, None for others: called with the
        # loader and the open pass.
        self.replace: Callable[[Any, OpenPass], Any] | None = None
        self.before_pass: list[Callable[[], None]] = []
        self.before_fetch: list[Callable[[], None]] = []
        self.on_batch: list[Callable[[OpenPass, int, Any], None]] = []

    def install(self) -> None:
        """Subscribe to ``DataLoader`` and ``Subset``."""
        guarded = self._observation.guarded
        Tap("torch.utils.data.dataset", "Subset.__init__").after(guarded(_HOOK, self._note_split))
        taps.LOADER.after(guarded(_HOOK, self._note_loader))
        taps.EPOCH.around(self._new_iterator)
        taps.BATCH.around(self._next_batch)
        taps.BATCH_INDEX.around(self._index)
        self._observation.before_end.append(self.close)

    def _new_iterator(self, make: Callable[[Any], Any], loader: Any) -> Any:
        if not self._observation.is_observed or self._fetches:
            return make(loader)
        return self._begin(loader, make)

    def _next_batch(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        if not self._observation.is_observed or self._fetches:
            return fetch(iterator)
        return self.fetch(iterator, fetch)

    def _index(self, next_index: Callable[[Any], Any], iterator: Any) -> Any:
        found = self.opening or self._passes.get(iterator)
        if found is None or not self._observation.is_observed:
            return next_index(iterator)
        return self._next_index(iterator, found, next_index)

    def _note_loader(self, _: None, loader: Any, *__: Any, **___: Any) -> None:
        self._lines[loader] = user_line()

    def line_of(self, loader: Any) -> str:
        """Return the line that made a loader; "" if it is not known."""
        return str(self._lines.get(loader, ""))

    def _note_split(self, _: None, subset: Any, *__: Any, **___: Any) -> None:
        self._splits[subset] = user_line()

    def facts_of(self, loader: Any) -> LoaderFacts:
        """Return the facts of a loader; add it if it is new."""
        found = self.keys.get(loader)
        if found is None:
            found = self.keys[loader] = self._describe(loader)
            self._observation.facts.loaders.append(found)
        return found  # type: ignore[no-any-return]

    def _describe(self, loader: Any) -> LoaderFacts:
        dataset = dataset_of(loader)
        sampler, is_stream = sampler_of(loader), isinstance(dataset, IterableDataset)
        return LoaderFacts(
            key=len(self._observation.facts.loaders),
            line=self._lines.get(loader, ""),
            **describe_dataset(dataset),
            is_iterable=is_stream,
            batch_size=loader.batch_size,
            sampler=type(sampler).__name__,
            sampler_has_epoch=hasattr(dataset if is_stream else sampler, "set_epoch"),
            drops_last=bool(loader.drop_last),
            workers=int(loader.num_workers),
            split_line=self._splits.get(dataset, "") if isinstance(dataset, Subset) else "",
            **(stream_lines(dataset) if is_stream else lines_of_sampler(sampler)),
        )

    # Passes

    def _begin(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        guarded = self._observation.guarded
        if guarded(_HOOK, self._is_enough)(loader):
            self._end()
        for call in self.before_fetch:
            guarded(_HOOK, call)()
        if self._observation.step:
            for call in self.before_pass:
                guarded(_HOOK, call)()
        opened = guarded(_HOOK, self._begin_pass)(loader)
        self.opening = self.fetching = opened
        try:
            iterator = None
            if self.replace is not None and opened is not None:
                iterator = guarded(_HOOK, self.replace)(loader, opened)
            if iterator is None:
                iterator = make(loader)
        finally:
            self.opening = self.fetching = None
        if opened is not None:
            self._passes[iterator] = opened
            opened.sampler = getattr(iterator, "_sampler_iter", None)
            self._open.append(opened)
        return iterator

    def _is_enough(self, loader: Any) -> bool:
        """Return whether the run ends before this pass."""
        facts = self.keys.get(loader)
        if facts is None:
            return False
        trained = sum(one.phase == Phase.TRAINING for one in facts.passes)
        return bool(trained >= self._observation.settings.passes)

    def _begin_pass(self, loader: Any) -> OpenPass:
        facts = self.facts_of(loader)
        self.ended_at_step = None
        for opened in [one for one in self._open if one.loader is facts]:
            self._open.remove(opened)
            if opened.facts.planned is None and not facts.is_iterable:
                self._close(opened)
        sampler = sampler_of(loader)
        epoch = getattr(sampler, "epoch", None)
        one = PassFacts(
            number=len(facts.passes),
            phase=Phase.EVALUATION,
            line=user_line(),
            sampler_epoch=epoch if isinstance(epoch, int) else None,
            batches=0,
            planned=None,
            is_complete=False,
            first_step=self._observation.step,
        )
        facts.passes.append(one)
        return OpenPass(facts, one, loader, is_short=is_in_loop() or None)

    def note_backward(self) -> None:
        """Note a backward: the pass whose batch was returned last is one of training."""
        if self.last is not None:
            self.last.facts.phase = Phase.TRAINING

    def note_step(self) -> None:
        """Note an optimizer step."""
        if (last := self.last) and not last.first_group and last.facts.phase == Phase.TRAINING:
            last.first_group = max(last.returned - (last.ahead is not None), 1)

    @property
    def has_ended_early(self) -> bool:
        """Whether the batch that was returned last is the last one of a shortened pass."""
        last = self.last
        if last is None:
            return False
        is_returned = last.returned >= len(last.indices)
        if last.loader.is_iterable:  # without a length, libraries read one batch ahead
            is_returned = last.loader.dataset_length is not None
        return last.is_at_end or (last.is_stopped and is_returned)

    # Indices

    def _next_index(self, iterator: Any, opened: OpenPass, request: Callable[[Any], Any]) -> Any:
        if opened.rest:
            opened.indices.append(listed(opened.rest[0]))
            return opened.rest.pop(0)
        if opened.is_stopped or opened.planned is not None:
            raise StopIteration
        is_stream = opened.loader.is_iterable
        if not is_stream and self._observation.guarded(_HOOK, self._is_last)(opened):
            rest = self._drain(lambda: request(iterator))
            if not rest:
                raise StopIteration
            planned = [*known(opened.indices), *map(listed, rest)]
            is_whole = self._ends_with_a_smaller_group(opened, len(planned))
            opened.is_stopped = len(rest) > 1 and not is_whole
            opened.planned = planned if sum(map(len, planned)) <= MAX_PLANNED else None
            index, opened.rest = (rest[0], rest[1:]) if is_whole else (rest[-1], [])
        else:
            index = request(iterator)
        opened.indices.append(None if is_stream else listed(index))
        return index

    def _ends_with_a_smaller_group(self, opened: OpenPass, batches: int) -> bool:
        """Return whether a pass, the first such one, is run as a whole.

        Batches are accumulated, and the last step has fewer of them than the others.
        """
        is_training = any(one.phase == Phase.TRAINING for one in opened.loader.passes)
        has_rest = self._group > 1 and batches % self._group > 0
        most = MAX_WHOLE * self._observation.settings.batches
        if self._has_whole or not (is_training and has_rest) or batches > most:
            return False
        self._has_whole = True
        return True

    def _drain(self, request: Callable[[], Any]) -> list[Any]:
        """Return the indices of the rest of the batches, without limit for finite samplers."""
        rest, count = [], 0
        while count <= MAX_PLANNED:
            try:
                rest.append(request())
            except StopIteration:
                break
            count += len(listed(rest[-1]))
        return rest

    def _is_last(self, opened: OpenPass) -> bool:
        """Return whether the batch that is requested now is the last one of a shortened pass.

        The batches of a stream count when they are returned: workers read them before.
        """
        if opened.is_short is not True:
            return False
        least, number = self._observation.settings.batches, len(opened.indices)
        if opened.loader.is_iterable:
            number = opened.returned
        earlier = [one for one in opened.loader.passes[:-1] if one.phase == Phase.TRAINING]
        if opened.loader.passes[:-1] and not earlier:
            return number + 1 >= self._most_evaluated(opened)  # an evaluation, as before
        if earlier and self._group:
            return number + 1 >= least and (number + 1) % self._group == 0
        if opened.returned + 1 < least:
            return False
        if opened.facts.phase != Phase.TRAINING:
            return number + 1 >= self._most_evaluated(opened)  # evaluated so far
        group = opened.first_group
        if group:
            self._group = group
        return (bool(group) and (number + 1) % group == 0) or number >= MAX_GROUP

    def _most_evaluated(self, opened: OpenPass) -> int:
        """Return how many batches of an evaluation are read: all of a few, to compare results."""
        settings = self._observation.settings
        is_short = not opened.loader.is_iterable and length_of(opened.source) is not None
        return max(settings.evaluated, settings.batches) if is_short else settings.batches

    _group = 0  # batches of the first step of the training
    _has_whole = False  # whether a pass was not shortened to reach a smaller group at its end

    # Batches

    def fetch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        opened = self._passes.get(iterator)
        if opened is None:
            return fetch(iterator)
        if opened.is_stopped and opened.loader.is_iterable:
            self._observation.guarded(_HOOK, self._end_pass)(opened, True)
            self._note_end(opened)
            raise StopIteration
        for call in self.before_fetch:
            self._observation.guarded(_HOOK, call)()
        if opened.is_short is None:
            opened.is_short = bool(self._observation.guarded(_HOOK, is_in_loop)())
        self._fetches, self.fetching = True, opened
        try:
            batch = fetch(iterator)
            is_last = self._observation.guarded(_HOOK, self._is_last)
            is_own = opened.sampler is not None  # not that of a replay
            if opened.loader.is_iterable and is_own and is_last(opened):
                batch = self._last_of_stream(iterator, fetch, opened, batch)
        except StopIteration:
            self._observation.guarded(_HOOK, self._end_pass)(opened, True)
            self._note_end(opened)
            raise
        finally:
            self._fetches, self.fetching = False, None
        self._observation.guarded(_BATCH, self._note_batch)(opened, batch)
        return batch

    def _last_of_stream(
        self, iterator: Any, fetch: Callable[[Any], Any], opened: OpenPass, batch: Any
    ) -> Any:
        """Return the last batch of a stream, or one that is as far as it is read."""
        self.fetching, start = None, time.monotonic()
        for _ in range(MAX_SKIPPED):
            if self._skipped_s + time.monotonic() - start > SKIPPING_S:
                break
            try:
                after = fetch(iterator)
            except StopIteration:
                opened.facts.is_read = True
                break
            opened.facts.skipped += 1
            opened.facts.skipped_samples += samples_in(batch)
            batch = after
        self._skipped_s += time.monotonic() - start
        opened.is_stopped = True
        return batch

    def _note_batch(self, opened: OpenPass, batch: Any) -> None:
        number, samples = opened.returned, opened.samples or samples_in(batch)
        indices = opened.indices[number] if number < len(opened.indices) else None
        opened.returned += 1
        self.has_batches = True
        opened.facts.batches = opened.returned
        self.last = opened
        facts = BatchFacts(
            loader=opened.loader.key,
            pass_number=opened.facts.number,
            number=number,
            samples=samples,
            indices=indices,
            contents=sample_checksums(batch, samples),
            step=self._observation.step,
        )
        added = self._observation.add_batch(facts)
        self._observation.batch_types.add(type(batch))
        if is_read_ahead():
            opened.ahead, added = added, opened.ahead
        if added is not None:
            self._observation.unassigned.append(added)
        for call in self.on_batch:
            call(opened, number, batch)

    def _note_end(self, opened: OpenPass) -> None:
        if opened.facts.phase is Phase.TRAINING or not self._observation.step:
            self.ended_at_step = self._observation.step

    def _end_pass(self, opened: OpenPass, is_exhausted: bool = False) -> None:
        if opened.ahead is not None:
            self._observation.unassigned.append(opened.ahead)
            opened.ahead = None
        if opened.facts.planned is not None:
            return
        opened.facts.is_complete = is_exhausted and not opened.is_stopped
        if not opened.loader.is_iterable:
            opened.facts.planned = opened.planned or (
                known(opened.indices) if opened.facts.is_complete else None
            )

    def close(self) -> None:
        """Complete the facts of passes that the script has left: list the rest of their indices."""
        for opened in self._open:
            if opened.facts.planned is None and not opened.loader.is_iterable:
                self._close(opened)
        self._open.clear()

    def _close(self, opened: OpenPass) -> None:
        if opened.is_stopped or self.replace is not None:
            self._end_pass(opened)
            return
        sampler = opened.sampler
        if sampler is None:
            return
        with kept_generators(sampler_of(opened.source)):
            rest = self._drain(lambda: next(sampler))
        if sum(len(listed(one)) for one in rest) <= MAX_PLANNED:
            opened.facts.planned = [*known(opened.indices), *map(listed, rest)]
            opened.facts.is_complete = opened.returned == len(opened.facts.planned)


# Shorten epochs of Lightning: its loops compare numbers of batches with the loader's length.
#
# A shortened pass ends before that length. The loop is told so with the last batch, so that it
# validates and ends the epoch as after a whole one.


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class LightningEpochs:
    """The epochs of Lightning's Trainer.

    Args:
        observation: Knows whether the training is observed.
        loaders: Know whether a pass was shortened.
    """

    def __init__(self, observation: Observation, loaders: Loaders) -> None:
        self._observation, self._loaders = observation, loaders

    def install(self) -> None:
        """Subscribe to Lightning's loops."""
        for package in _PACKAGES:
            Tap(f"{package}.loops.fetchers", "_DataFetcher.__next__").after(self._note_batch)
            loop = f"{package}.loops.training_epoch_loop"
            Tap(loop, "_TrainingEpochLoop._should_check_val_fx").around(self._validates)

    @property
    def _is_end(self) -> bool:
        return self._observation.is_observed and self._loaders.has_ended_early

    def _note_batch(self, _: Any, fetcher: Any) -> None:
        if self._is_end:
            fetcher.done = True

    def _validates(self, check: Function, loop: Any, data_fetcher: Any) -> bool:
        """Return whether the loop validates after this batch."""
        trainer, is_end = loop.trainer, self._is_end
        interval = trainer.val_check_batch
        if not (is_end and data_fetcher.done) or interval in (None, float("inf")):
            return bool(check(loop, data_fetcher))
        is_epoch = trainer.check_val_every_n_epoch is not None
        trainer.val_check_batch = (loop.batch_idx if is_epoch else loop.total_batch_idx) + 1
        try:
            return bool(check(loop, data_fetcher))
        finally:
            trainer.val_check_batch = interval
