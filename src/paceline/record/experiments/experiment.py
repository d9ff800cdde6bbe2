"""Run the phases of an experiment of ``paceline diagnose`` (a rung) in a rank's process.

The experiment patches the same functions of torch as the recorder. After the last phase the process
ends at once: the rest of the script and its exit handlers do not run.
"""

import inspect
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..hooks import taps
from ..hooks.collectives import RecordedGroup
from ..hooks.import_hooks import after_import
from ..pending_value import PendingValue, is_capturing
from ..ring.core_wait import busy_threads, child_pids, thread_times
from ..ring.launcher_messages import notify
from ..ring.recorder import Recorder
from ..ring.resource_usage import (
    FileOpenCounter,
    bytes_read,
    cpu_seconds,
    measure_open_s,
)
from .cached_batches import CachedBatches
from .growing_containers import ContainerSizes
from .lines.rank_profile import RankProfile
from .memory_format import ContiguousFormat
from .no_communication import NoCommunicationGroup
from .observer import Observer
from .protected_run import ProtectedRun, StepLimit
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
from .single_precision import install as use_single_precision
from .survey_end import SurveyEnd
from .switches import BufferBroadcasts, GarbageCollector, ScriptThreads, Switch

if TYPE_CHECKING:
    from .operators.operator_rows import OperatorRun

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
            from .operators.operator_rows import OperatorRun

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
                from .operators.operator_rows import write_rows

                write_rows(path, operators.finish())
        except Exception as error:
            self._end_profile(f"{type(error).__name__}: {error}")
        self._end_profile("")

    def _end_profile(self, failure: str) -> NoReturn:
        self._results["profile_failure"] = failure[:200]
        self._finish()

    def _enter(self, phase: str) -> None:
        import torch

        if phase in (SILENT, ONE_THREAD) and not self._results["silent"]:
            self._replace_groups()
        if phase == ONE_THREAD:
            self._usual_threads = torch.get_num_threads()
            inspect.unwrap(torch.set_num_threads)(1)  # a knob may have replaced the function

    def _leave(self, phase: str) -> None:
        import torch

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
        self._results["loader"] = totals | {"workers": len(child_pids())}
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
