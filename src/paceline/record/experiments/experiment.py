"""Run the phases of an experiment of ``paceline diagnose`` (a rung) in a rank's process.

The experiment patches the same functions of torch as the recorder. After the last phase the process
ends at once: the rest of the script and its exit handlers do not run.
"""

import copy
import inspect
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..hooks import keras_training, taps
from ..hooks.collectives import RecordedGroup
from ..hooks.import_hooks import after_import
from ..pending_value import PendingValue, is_capturing
from ..ring.core_wait import busy_threads, child_pids, thread_times
from ..ring.launcher_messages import notify
from ..ring.recorder import Recorder
from ..ring.resource_usage import FileOpenCounter, bytes_read, cpu_seconds, measure_open_s
from .lines.rank_profile import RankProfile
from .observer import ContainerSizes, Observer
from .protected_run import ProtectedRun, StepLimit, SurveyEnd
from .rung import (
    CHANNELS_LAST,
    EVERYTHING,
    LOADER,
    NO_BROADCASTS,
    NO_COLLECTION,
    ONE_THREAD,
    SILENT,
    SINGLE_PRECISION,
    THREADS_PAUSED,
    Rung,
)
from .switches import (
    BufferBroadcasts,
    ContiguousFormat,
    GarbageCollector,
    NoCommunicationGroup,
    ScriptThreads,
    Switch,
    use_single_precision,
)

# Input from memory
#
# Batches come from DataLoaders, or from the iterators of ``keras.Model.fit`` with TensorFlow.


MAX_CACHED_BATCHES = 8  # per dataset; they are returned in rotation
_SOURCE = "_paceline_source"  # attribute of a loader: the data of the script that it was made for
_LENGTH = "_paceline_length"  # and the number of its batches


class CachedBatches:
    """A subscriber to ``DataLoader`` that caches batches and later returns them from memory.

    Batches are kept by the data that they are made of: the loader's dataset; of loaders that Keras
    makes anew for each epoch, what the script has passed to ``fit``.

    Args:
        observer: Receives the durations of fetches and of loader starts.
        is_caching: Whether fetched batches are to be cached now.
        is_replaying: Whether batches come from memory now.
        run_loader_only: Called before each fetch. In the phase that measures the loader alone it
            does not return.
    """

    def __init__(
        self,
        observer: Observer,
        is_caching: Callable[[], bool],
        is_replaying: Callable[[], bool],
        run_loader_only: Callable[..., None],
    ) -> None:
        self.replayed = 0  # batches that came from memory
        self.serves_keras = False  # Keras makes the loaders
        self.convert: Callable[[Any], Any] | None = None  # applied to each leaf of such a batch
        self._observer, self._run_loader_only = observer, run_loader_only
        self._is_caching, self._is_replaying = is_caching, is_replaying
        # By id of the data, with the data: an id is used again after the end of its object.
        self._batches: dict[int, tuple[Any, list[_Batch]]] = {}
        self._epoch_batches: Callable[[], Any] = _unknown  # of Keras' last iterator

    def install(self) -> None:
        """Subscribe to the batches and iterators of loaders, and to Keras' epochs."""
        taps.EPOCH.wrap(self._iterators)
        taps.BATCH.wrap(self._fetches)
        for module, kind in (
            (keras_training.TORCH_TRAINER, "TorchEpochIterator"),
            (keras_training.TENSORFLOW_TRAINER, "TFEpochIterator"),
        ):
            taps.Tap(module, f"{kind}.__init__").before(self._note_source)
        loaders = taps.Tap(keras_training.TORCH_TRAINER, "TorchEpochIterator._get_iterator")
        loaders.after(self._mark_loader)
        keras_training.next_batch = self.next_of_model

    def _iterators(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        class ReplayIterator(_BaseDataLoaderIter):
            """Replaces an iterator whose workers would not be used."""

            def __init__(self, loader: Any) -> None:
                self._dataset, self._num_yielded = loader.dataset, 0
                self._paceline_loader = loader

            def __len__(self) -> int:
                return len(self._paceline_loader)

        def new_iterator(loader: Any) -> Any:
            if self._is_replaying() and self._batches_of(_source(loader, loader.dataset)):
                return ReplayIterator(loader)
            start = time.perf_counter()
            iterator = make(loader)
            iterator._paceline_loader = loader
            iterator._paceline_opening = time.perf_counter() - start
            return iterator

        self._make_iterator, self._replay_iterator = make, ReplayIterator
        return new_iterator

    def _fetches(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def next_batch(iterator: Any) -> Any:
            loader = iterator.__dict__.get("_paceline_loader")
            without_workers = isinstance(iterator, self._replay_iterator)
            self._run_loader_only(
                iterator, fetch, lambda: self._make_iterator(loader), without_workers
            )
            source = _source(loader, iterator._dataset)
            batches = self._batches_of(source)
            if self._is_replaying() and batches:
                return self._next_cached(iterator, batches)
            start = time.perf_counter()
            try:
                batch = fetch(iterator)
            except StopIteration:  # its workers have ended by now
                self._observer.loader_stopped(id(source), time.perf_counter() - start)
                raise
            opening = iterator.__dict__.pop("_paceline_opening", None)
            seconds = time.perf_counter() - start
            self._observe(source, _length(iterator), batch, seconds, opening)
            self._keep(source, batches, batch)
            return batch

        return next_batch

    def _mark_loader(self, loader: Any, epoch: Any) -> None:
        """Mark a loader that Keras makes for an epoch with PyTorch."""
        if hasattr(loader, "dataset"):
            setattr(loader, _SOURCE, getattr(epoch, _SOURCE, loader.dataset))
            setattr(loader, _LENGTH, epoch.num_batches)

    def _note_source(self, epoch: Any, *_: Any, **kwargs: Any) -> None:
        """Note the data that Keras iterates over."""
        if "x" in kwargs:
            setattr(epoch, _SOURCE, kwargs["x"])
        self._epoch_batches, self.serves_keras = lambda: epoch.num_batches, True

    def next_of_model(self, model: Any, iterator: Any) -> Any:
        """Return the next batch for a training step of a Keras model with TensorFlow."""
        self._run_loader_only(iterator, next, _unknown, False)
        batches = self._batches_of(model)
        if self._is_replaying() and batches:
            self.replayed += 1
            return batches[self.replayed % len(batches)].restored()
        start = time.perf_counter()
        batch = next(iterator)
        seconds, opening = time.perf_counter() - start, None
        if id(model) not in self._batches:
            self._batches[id(model)] = (model, batches)
            opening = 0.0
        self._observe(model, self._epoch_batches() or float("inf"), batch, seconds, opening)
        self._keep(model, batches, batch)
        return batch

    def _batches_of(self, source: Any) -> "list[_Batch]":
        return self._batches.get(id(source), (source, []))[1]

    def _keep(self, source: Any, batches: "list[_Batch]", batch: Any) -> None:
        if len(batches) < MAX_CACHED_BATCHES and self._is_caching():
            batches.append(_Batch(batch))
            self._batches[id(source)] = (source, batches)

    def _observe(
        self, source: Any, length: float, batch: Any, seconds: float, opening: float | None
    ) -> None:
        """Report a fetch; opening: seconds for the iterator, whose first batch it is."""
        if opening is not None:
            self._observer.loader_started(id(source), opening + seconds, length)
        self._observer.batch_fetched(id(source), batch, seconds if opening is None else None)

    def _next_cached(self, iterator: Any, batches: "list[_Batch]") -> Any:
        yielded = iterator.__dict__.setdefault("_paceline_given", iterator._num_yielded)
        if yielded >= _length(iterator):
            raise StopIteration
        iterator._paceline_given += 1
        self.replayed += 1
        batch = batches[self.replayed % len(batches)].restored()
        return batch if self.convert is None else tree_map(self.convert, batch)


class _Batch:
    """A cached batch that can be returned many times, even if the script modifies it in place."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._pristine = tree_map(_copy_leaf, batch)
        self._versions = _tensor_versions(batch)

    def restored(self) -> Any:
        """Return the batch in new containers, with the values that came from the loader."""
        if _tensor_versions(self._batch) != self._versions:  # modified in place by the script
            self._batch = tree_map(_copy_leaf, self._pristine)
            self._versions = _tensor_versions(self._batch)
        return tree_map(lambda leaf: leaf, self._batch)


def _tensor_versions(batch: Any) -> list[int]:
    return [getattr(leaf, "_version", 0) for leaf in tree_leaves(batch)]


def _copy_leaf(leaf: Any) -> Any:
    if not hasattr(leaf, "clone"):
        return copy.copy(leaf)
    made = leaf.clone()
    return made.pin_memory() if getattr(leaf, "is_pinned", bool)() else made


def _source(loader: Any, dataset: Any) -> Any:
    """Return the data that the batches of a loader are made of."""
    return getattr(loader, _SOURCE, dataset)


def _length(iterator: Any) -> float:
    known = getattr(iterator.__dict__.get("_paceline_loader"), _LENGTH, None)
    try:
        return float(known or len(iterator))
    except TypeError:  # an IterableDataset without a length
        return float("inf")


def _unknown() -> None:
    """Stand for a number of batches, or for another iterator, that can't be had."""


if TYPE_CHECKING:
    from .operators.operator_profile import OperatorRun

LEAST_KERNEL_STEPS = 5  # of a survey: a GPU's kernels are sampled after the measured steps
INSPECTED_STEPS = 2  # at the beginning: the calls of all modules are inspected
# Phases with the loader's batches.
_WITH_LOADER = (
    *(EVERYTHING, LOADER, SINGLE_PRECISION),
    *(NO_COLLECTION, THREADS_PAUSED, NO_BROADCASTS),
)
MAX_LOADER_S = 2.0  # of the phase that measures the loader alone


class Experiment(ProtectedRun):
    """One rung, carried out in this process."""

    def __init__(self, rung: Rung, recorder: Recorder, detach: Callable[[], None]) -> None:
        super().__init__(StepLimit(0, rung.scratch, rung.covered), recorder, detach)
        self.rung = rung
        self._phase = rung.phases[0]
        self._usual_threads = 0  # of the rank, restored after the phase with one thread
        self._collector = GarbageCollector()
        self._observer = Observer(self._collector)
        self._other_threads = ScriptThreads(lambda: recorder.training_thread)
        self._switches: dict[str, Switch] = {
            NO_COLLECTION: self._collector,
            THREADS_PAUSED: self._other_threads,
            NO_BROADCASTS: BufferBroadcasts(self._observer.ddp_models),
        }
        self._is_switched_off = False
        self._results["silent"] = 0
        self._containers: ContainerSizes | None = None  # after the first step
        self._operators: OperatorRun | None = None
        self._step_times: list[float] = []  # s, of the measured steps of the last phase
        self._losses: list[PendingValue] = []
        self._step_start = time.perf_counter()
        least_step = rung.warm + rung.steps + LEAST_KERNEL_STEPS
        self._survey = SurveyEnd(Path(rung.scratch), rung.survey_until, least_step)
        self._is_complete = False  # the measurements
        self._cached_batches = CachedBatches(
            self._observer, self._is_caching, self._is_replaying, self._run_loader_only
        )
        self._switches[CHANNELS_LAST] = ContiguousFormat(
            self._observer.convolutions, self._cached_batches
        )

    def install(self) -> None:
        """Patch torch. Must precede the recorder's own hooks, which then wrap these."""
        self._observer.install()
        self._collector.install()
        if THREADS_PAUSED in self.rung.phases:
            self._other_threads.install()
        if SINGLE_PRECISION in self.rung.phases:
            after_import({"torch": use_single_precision})
        self._file_opens = FileOpenCounter()
        self._lines = RankProfile(
            self.recorder, self._file_opens, self._observer.gradient_addresses
        )
        self._lines.install()
        self._cached_batches.install()
        if self.rung.losses:
            taps.on_loss(self._record_loss)
        super().install()

    def after_step(self) -> None:
        """Advance the experiment; called at the end of every optimizer step of the job."""
        if self._operators is not None:
            self._continue_profile(self._operators)
            return
        step, index = self.recorder.step, self.rung.phase_index(self.recorder.step)
        self._lines.stop_counting()
        if self.rung.measures(step - 1):
            self._step_times.append(time.perf_counter() - self._step_start)
            self._observer.after_step()
            if not self.rung.measures(step):
                self._lines.stop()
                switch = self._switches.get(self._phase)
                self._observer.end_phase(self._phase, switch.results() if switch else {})
                if self._phase == EVERYTHING:
                    self._results["workers"] = len(child_pids())
                    self._find_growing_containers(step)
                self.write_results()  # the run may be ended before its last phase
        if step == 1:
            self._containers = ContainerSizes()
        if index == len(self.rung.phases) and self.rung.profiles:
            self._begin_profile()
            return
        if index == len(self.rung.phases):
            if not self._survey.is_over(step, self._observer.epoch_batches, self.recorder.has_room):
                return
            self._finish()
        phase = self.rung.phases[index]
        if phase != self._phase:
            self._leave(self._phase)
            if self._phase == EVERYTHING:
                self._lines.start_counting()
            self._phase = phase
            self._enter(phase)
        elif step == 1:  # the first phase; only now are there process groups to replace
            self._enter(phase)
        self._set_switch(phase, step)
        if step == min(INSPECTED_STEPS, self.rung.warm):
            self._observer.end_setup()
        if self.rung.measures(step) and not self.rung.measures(step - 1):
            self._observer.begin_phase()
            expected = (time.perf_counter() - self._step_start) * self.rung.steps
            self._lines.start(is_kept=self._phase == EVERYTHING, expected_s=expected)
        self._step_start = time.perf_counter()

    def _find_growing_containers(self, step: int) -> None:
        """Store what grew in each step since the first; a failure ends no experiment."""
        try:
            if self._containers is not None and (growing := self._containers.growing(step - 1)):
                self._results["growing"] = growing
        except Exception as error:  # of an object of the script
            notify(f"warning: Paceline could not look for memory that grows: {error}\n")
        self._containers = None

    def _set_switch(self, phase: str, step: int) -> None:
        """Switch the part that a switched phase tests off or on for the next step."""
        switch = self._switches.get(phase)
        if switch is None:
            return
        switch.after_step()
        if (off := self.rung.is_off(step)) != self._is_switched_off:
            self._is_switched_off = off
            (switch.off if off else switch.on)()

    # Operators

    def _begin_profile(self) -> None:
        """Profile the operators of the next steps. The results so far are stored before."""
        self._complete()
        self.write_results()
        try:
            from .operators.operator_profile import OperatorRun

            used = self._observer.facts["used"][self._phase]
            waits = used["delayed"] / used["thread"] if used.get("thread") else 0.0
            step_s = statistics.median(self._step_times)
            self._operators = OperatorRun(self._observer.optimizers, step_s, 1 + waits)
            self._operators.start()
        except Exception as error:
            self._end_profile(f"{type(error).__name__}: {error}")

    def _continue_profile(self, operators: "OperatorRun") -> None:
        path = self.recorder.path
        try:
            if not operators.after_step():
                return
            if path is not None:
                from .operators.operator_profile import write_rows

                write_rows(path, operators.finish())
        except Exception as error:
            self._end_profile(f"{type(error).__name__}: {error}")
        self._end_profile("")

    def _end_profile(self, failure: str) -> NoReturn:
        self._results["profile_failure"] = failure[:200]
        self._finish()

    def _enter(self, phase: str) -> None:
        if phase in (SILENT, ONE_THREAD) and not self._results["silent"]:
            self._replace_groups()
        if phase == ONE_THREAD:
            self._usual_threads = torch.get_num_threads()
            inspect.unwrap(torch.set_num_threads)(1)  # a knob may have replaced the function

    def _leave(self, phase: str) -> None:
        if self._is_switched_off:
            self._is_switched_off = False
            self._switches[phase].on()
        if phase == ONE_THREAD:
            inspect.unwrap(torch.set_num_threads)(self._usual_threads)
        self._cached_batches.convert = None

    def _record_loss(self, loss: Any) -> None:
        is_measured = loss.numel() == 1 and self.rung.measures(self.recorder.step)
        if is_measured and not is_capturing():
            self._losses.append(PendingValue(loss))

    # The input

    def _is_caching(self) -> bool:
        return self.recorder.step < self.rung.warm

    def _is_replaying(self) -> bool:
        return self._phase not in _WITH_LOADER

    def _run_loader_only(
        self,
        iterator: Any,
        fetch: Callable[[Any], Any],
        make_iterator: Callable[[], Any],
        without_workers: bool,
    ) -> None:
        """In the phase ``loader``: fetch batches over one or more epochs, then end the process.

        ``without_workers``: the iterator returns cached batches; a real one is made first.
        ``make_iterator`` returns None where no further one can be made.
        """
        if self._phase != LOADER:
            return
        iterator = make_iterator() if without_workers else iterator
        start, before = time.perf_counter(), self._loader_usage()
        threads = thread_times(["self", *child_pids()])
        times: list[float] = []
        while len(times) < self.rung.steps and time.perf_counter() - start < MAX_LOADER_S:
            fetch_start = time.perf_counter()
            try:
                fetch(iterator)
            except StopIteration:
                iterator = make_iterator()
                if iterator is None:
                    break
                fetch(iterator)
            times.append(time.perf_counter() - fetch_start)
        used = {name: now - before[name] for name, now in self._loader_usage().items()}
        totals = {"batches": len(times), "seconds": sum(times), **used, "open_s": measure_open_s()}
        length = int((time.perf_counter() - start) * 1e9)
        busy, waited = busy_threads(threads, thread_times(["self", *child_pids()]), length)
        totals |= {"waited_s": waited / 1e9, "busy_threads": busy}
        keras = int(self._cached_batches.serves_keras)
        self._results["loader"] = totals | {"workers": len(child_pids()), "keras": keras}
        self._finish()

    def _loader_usage(self) -> dict[str, float]:
        """Return totals of this process and its running children.

        They are CPU seconds, those of them inside the kernel, bytes read, those of them read from
        storage, and files opened.
        """
        pids = (str(os.getpid()), *child_pids())
        user, system = (sum(part) for part in zip(*map(cpu_seconds, pids), strict=True))
        read, stored = (sum(part) for part in zip(*map(bytes_read, pids), strict=True))
        return {
            "busy_s": user + system,
            "system_s": system,
            "read": read,
            "stored": stored,
            "opened": int(self._file_opens),
        }

    # The communication

    def _replace_groups(self) -> None:
        from torch.distributed.distributed_c10d import _world

        for group in list(_world.pg_map):
            if isinstance(group, RecordedGroup):
                group.inner = NoCommunicationGroup(group.inner)  # type: ignore[assignment]
                group._checks = None
                self._results["silent"] += 1

    def _complete(self) -> None:
        """End the measurements, and write the line profile."""
        if "stopped" not in self._results and not self._is_complete:
            self._is_complete = True
            self._observer.finish()
            self._lines.write()

    def write_results(self) -> None:
        """Write the results so far into the record's header."""
        if self._losses:
            self._results["loss"] = statistics.fmean(loss.read() for loss in self._losses)
        results = self._results | {"cached": self._cached_batches.replayed} | self._observer.facts
        self.recorder.update_header(rung=results)

    def _finish(self) -> NoReturn:
        """Stop the line profile, and end this process."""
        self._lines.stop()
        super()._finish()
