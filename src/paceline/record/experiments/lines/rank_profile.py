"""The line profile of one rank: samples of its training thread and of its loader workers."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from ...ring.launcher_messages import notify
from ...ring.recorder import Recorder, now
from ...ring.resource_usage import FileOpenCounter
from ...ring.ring import PROFILE_SUFFIX
from .activity import Described
from .collective_calls import CollectiveCalls
from .execution_counter import ExecutionCounter
from .sampler import MEAN_INTERVAL_S, LineSampler
from .sidecar import MAX_SAMPLES, PROFILE_VERSION, LineProfile, write_json
from .table import StackTable
from .worker_profile import WorkerProfiles

_P = ParamSpec("_P")
WANTED_SAMPLES = 300  # of a phase
MIN_INTERVAL_S = 0.005  # about 3 % of the time is spent in sampling then
MIN_COUNTED_SAMPLES = 3  # in a function: then the executions of its lines are counted


def _reported(method: Callable[Concatenate["RankProfile", _P], None]) -> Callable[..., None]:
    """Return the method so that an exception ends the profile, and not the user's script."""

    @functools.wraps(method)
    def call(self: "RankProfile", *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self.has_failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.has_failed = True
            notify(f"warning: Paceline's line profile failed and is off: {error!r}\n")

    return call


def interval_for(expected_s: float) -> float:
    """Return the mean time between samples of a phase that takes so long."""
    return min(max(expected_s / WANTED_SAMPLES, MIN_INTERVAL_S), MEAN_INTERVAL_S)


class RankProfile:
    """Samples one rank while the measured steps of a phase run.

    Args:
        opened: Counter of opened files, which knows the last path of each thread.
        gradients: As for ``CollectiveCalls``.
    """

    def __init__(
        self,
        recorder: Recorder,
        opened: FileOpenCounter,
        gradients: Callable[[], tuple[set[int], set[int], int]] = lambda: (set(), set(), 0),
    ) -> None:
        self.recorder, self._opened = recorder, opened
        self._calls = CollectiveCalls(recorder, gradients)
        self.has_failed = False
        self._table = StackTable()
        self._samples: list[tuple[int, int, int, int, int, int]] = []
        self._start_ns = self._lost = 0
        self._interval_s = MEAN_INTERVAL_S
        self._is_kept = False
        self._sampler: LineSampler | None = None
        self._workers = WorkerProfiles(recorder, opened)
        self._counter: ExecutionCounter | None = None
        self._executions: dict[int, int] = {}

    def install(self) -> None:
        """Let the workers of loaders that are made from now on sample themselves, too."""
        self._workers.install()

    @_reported
    def start(self, is_kept: bool, expected_s: float) -> None:
        """Start to sample the training thread, which calls this.

        expected_s: Estimated duration of the phase. A short one is sampled more often.
        is_kept: Whether the samples are wanted. Phases whose samples are not wanted are sampled
        all the same, because phases are compared and sampling costs time.
        """
        self._is_kept = is_kept
        if is_kept:
            self._start_ns = now()
            self._workers.is_on = True
            self._interval_s = interval_for(expected_s)
        thread, interval = self.recorder.training_thread, interval_for(expected_s)
        self._sampler = LineSampler(thread, self._take, self._opened.last_path, interval_s=interval)
        self._sampler.start()
        self._calls.start(is_kept)

    @_reported
    def stop(self) -> None:
        self._calls.stop()
        self._workers.is_on = False
        if self._sampler is not None:
            self._sampler.stop()
            self.recorder.extra_cost_ns += self._sampler.cost_ns
            self._sampler = None

    def _take(
        self, at: int, late: int, described: Described, ran: int, delayed: int, garbage: int
    ) -> None:
        if not self._is_kept:
            return
        if len(self._samples) >= MAX_SAMPLES:
            self._lost += 1
            return
        number = self._table.number_of(described)
        self._samples.append((at - self._start_ns, late, number, ran, delayed, garbage))

    @_reported
    def start_counting(self) -> None:
        """Count how often sampled lines are executed, from now to ``stop_counting``."""
        functions: dict[tuple[str, str], int] = {}
        described = self._table.described
        for sample in self._samples:
            for file, _, function in described[sample[2]][0][:1]:
                functions[(file, function)] = functions.get((file, function), 0) + 1
        wanted = {key for key, count in functions.items() if count >= MIN_COUNTED_SAMPLES}
        self._counter = ExecutionCounter(wanted)
        self._counter.start()

    @_reported
    def stop_counting(self) -> None:
        if self._counter is None:
            return
        self._counter.stop()
        for place, count in self._counter.counts.items():
            number = self._table.frame_number(place)
            if number is not None:
                self._executions[number] = count
        self._counter = None

    @_reported
    def write(self) -> None:
        """Write the profile beside the rank's ring, if there are samples."""
        self.stop()
        self.stop_counting()
        path = self.recorder.path
        if path is None or not self._samples:
            return
        workers, worker_ns, times = self._workers.collect(self._table)
        collective_sites = self._calls.sites(self._table)
        profile: LineProfile = {
            "version": PROFILE_VERSION,
            "interval_ns": int(self._interval_s * 1e9),
            "start_ns": self._start_ns,
            "frames": self._table.frames(),
            "stacks": self._table.stacks(),
            "samples": self._samples,
            "lost": self._lost,
            "executions": list(self._executions.items()),
            "workers": workers,
            "worker_ns": worker_ns,
            "worker_times": times,
            "collective_sites": collective_sites,
            "collectives": self._calls.events(),
        }
        write_json(path.with_suffix(PROFILE_SUFFIX), profile)
