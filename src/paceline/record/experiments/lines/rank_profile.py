"""The line profile of one rank: samples of its training thread and of its loader workers."""

import contextlib
import ctypes
import functools
import gc
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Concatenate, ParamSpec

from ....security.files import read_regular
from ....security.schema import load_json
from ...hooks.taps import Function, Tap
from ...ring.core_wait import ThreadSchedule
from ...ring.launcher_messages import notify
from ...ring.recorder import Recorder, now
from ...ring.resource_usage import FileOpenCounter
from ...ring.ring import PROFILE_SUFFIX
from .activity import Described, Place, StackDescriber, StackTable, function_name
from .collective_calls import CollectiveCalls
from .sidecar import (
    MAX_PROFILE_BYTES,
    MAX_SAMPLES,
    MAX_WORKERS,
    PROFILE_VERSION,
    Activity,
    LineProfile,
    WorkerTime,
    write_json,
)

# Sampler of a thread's stack, which books the time of each sample to a line without bias.
#
# A sampler that needs the interpreter lock runs only when the sampled thread releases it. Three
# things keep the shares right all the same:
#
# - The time to the next sample is random and almost memoryless (exponential), so samples cannot
#   fall into step with the training.
# - A sample stands for the mean time between samples plus its own delay. A call of C that holds the
#   lock delays the sampler to its end, so the delay is the call's time. The time before the sample
#   was due is not only this line's: booking the whole time since the previous sample to it would
#   favour long calls.
# - Python code keeps the lock for the switch interval (5 ms) when another thread asks for it. In
#   that time the thread may reach an operator of torch, which releases the lock, and the sample
#   would be that operator's. While the sampler runs, the switch interval is therefore short, and
#   the timer of the sampler's thread is exact: Linux lets threads sleep 50 us longer by default.

MEAN_INTERVAL_S = 0.01
MIN_INTERVAL_SHARE, MAX_INTERVAL_SHARE = 0.1, 10.0  # of the mean interval
SWITCH_INTERVAL_S = 5e-6
LOOK_INTERVAL_S = 0.005  # the same while the sampler looks at a stack
_PR_SET_TIMERSLACK = 29

# Takes the time (ns), the delay (ns), the stack, and since the sample before: time on a core, time
# of waiting for a core and time of collecting garbage (ns).
TakeSample = Callable[[int, int, Described, int, int, int], None]


class LineSampler:
    """Background thread that samples one thread of this process from start() to stop().

    Args:
        thread: The sampled thread.
        take: Receives each sample, in the sampler's thread.
        last_opened: Returns the path of the file that the thread opened last; "" if unknown.
        is_on: Whether to sample now; asked at each wake-up.
        interval_s: Mean time from a sample to the time at which the next one is due.
        root: Code of the outermost function that belongs to the thread's work. A forked process
            has the stack of its parent below it.
    """

    def __init__(
        self,
        thread: int,
        take: TakeSample,
        last_opened: Callable[[int], str] = lambda thread: "",
        is_on: Callable[[], bool] = lambda: True,
        interval_s: float = MEAN_INTERVAL_S,
        root: CodeType | None = None,
    ) -> None:
        self._sampled, self._take = thread, take
        self._last_opened, self._is_on, self._interval_s = last_opened, is_on, interval_s
        self._describer = StackDescriber(root)
        self._random = random.Random()  # the script's own generator must not change
        self._end = threading.Event()
        self._garbage_ns = self._collection_start = 0
        self._thread: threading.Thread | None = None
        self.cost_ns = 0  # CPU time of sampling

    def start(self) -> None:
        self._end.clear()
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.callbacks.append(self._on_collection)
        self._thread = threading.Thread(target=self._run, name="paceline-lines", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling, and wait until the last sample is stored."""
        if self._thread is None:
            return
        self._end.set()
        self._thread.join()
        self._thread = None
        if abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-7:  # not changed by the script
            sys.setswitchinterval(self._switch_interval)
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, _: dict[str, Any]) -> None:
        if threading.get_ident() == self._sampled:
            if phase == "start":
                self._collection_start = now()
            elif self._collection_start:
                self._garbage_ns += now() - self._collection_start
                self._collection_start = 0

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, AttributeError):  # not Linux
                ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # of this thread, in ns
            schedule = ThreadSchedule(self._sampled)
            try:
                self._sample(schedule)
            finally:
                schedule.close()
                self.cost_ns += time.thread_time_ns()
        except Exception as error:  # must not print a stack between the script's output
            notify(f"warning: Paceline's line sampler failed and is off: {error!r}\n")

    def _sample(self, schedule: ThreadSchedule) -> None:
        ran, delayed = schedule.read() or (0, 0)
        least, most = (self._interval_s * x for x in (MIN_INTERVAL_SHARE, MAX_INTERVAL_SHARE))
        rate = 1 / (self._interval_s - least)
        while True:
            interval = min(least + self._random.expovariate(rate), most)
            due = now() + int(interval * 1e9)
            if self._end.wait(interval):
                return
            at = now()
            if not self._is_on():
                ran, delayed = schedule.read() or (0, 0)
                continue
            # Read the stack first: a system call would release the interpreter lock, and so would
            # the short switch interval.
            sys.setswitchinterval(LOOK_INTERVAL_S)
            frame = sys._current_frames().get(self._sampled)
            described = self._describer.describe(frame) if frame is not None else None
            del frame
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            if described is None:
                return
            places, activity, what = described
            garbage, self._garbage_ns = self._garbage_ns, 0
            if activity == Activity.FILE:
                what = self._last_opened(self._sampled) or what
            ran_before, delayed_before = ran, delayed
            ran, delayed = schedule.read() or (0, 0)
            self._take(
                at,
                max(at - due, 0),
                (places, activity, what),
                ran - ran_before,
                delayed - delayed_before,
                garbage,
            )


# Samples of the worker processes of a DataLoader, in which files are read and samples are made.
#
# A worker samples its own main thread while the rank measures. It writes the sums into a file in
# the job's folder when the measurement or the worker ends; the rank adds them to its profile.


MAX_SUMS = 1 << 12  # distinct stacks of one worker


class WorkerProfiles:
    """The samples of all loader workers of a rank. Workers that are not forked are not sampled."""

    def __init__(self, recorder: Recorder, opened: FileOpenCounter) -> None:
        self._recorder, self.opened = recorder, opened
        self._flag = mmap.mmap(-1, 1)  # shared with the workers
        self._folder: Path | None = None
        self._stem = ""

    @property
    def is_on(self) -> bool:
        return self._flag[0] != 0

    @is_on.setter
    def is_on(self, value: bool) -> None:
        self._flag[0] = value

    def install(self) -> None:
        Tap("torch.utils.data._utils.worker", "_worker_loop").wrap(self._profiled)
        os.register_at_fork(before=self.find_folder)  # a forked process has no ring

    def find_folder(self) -> None:
        """Note where the rank's ring is, for its workers."""
        if (ring := self._recorder.path) is not None:
            self._folder, self._stem = ring.parent, ring.stem

    def _profiled(self, run: Function) -> Function:
        rank_pid = os.getpid()

        def worker_loop(*args: Any, **kwargs: Any) -> Any:
            profile = None
            if os.getpid() != rank_pid and self._folder is not None:
                profile = WorkerProfile(self, run.__code__)
                profile.start()
            try:
                return run(*args, **kwargs)
            finally:
                if profile is not None:
                    profile.end()

        return worker_loop

    def file_of(self, pid: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._stem}.worker-{pid}"

    def collect(self, table: StackTable) -> tuple[int, int, list[WorkerTime]]:
        """Add the stacks of all workers to ``table``.

        Returns the number of workers, their sampled time (ns), and their time in each stack.
        """
        sums: dict[int, WorkerTime] = {}
        count, whole = 0, 0
        folder, pattern = self._folder, f"{self._stem}.worker-*"
        paths = sorted(folder.glob(pattern)) if folder is not None else []
        for path in paths:
            if path.suffix == ".part" or count >= MAX_WORKERS:
                continue
            found = load_json(read_regular(path, MAX_PROFILE_BYTES), path)
            path.unlink(missing_ok=True)
            count, whole = count + 1, whole + int(found["ns"])
            for places, activity, what, samples, ns, on_core in found["stacks"]:
                described = (tuple((f, n, q) for f, n, q in places), Activity(activity), what)
                number = table.number_of(described)
                row = sums.setdefault(
                    number, {"stack": number, "samples": 0, "ns": 0, "on_core_ns": 0}
                )
                row["samples"] += samples
                row["ns"] += ns
                row["on_core_ns"] += on_core
        return count, whole, list(sums.values())


class WorkerProfile:
    """The sampler inside of a worker."""

    def __init__(self, profiles: WorkerProfiles, root: CodeType) -> None:
        self._profiles = profiles
        self._sums: dict[Described, list[int]] = {}
        self._whole_ns = 0
        self._was_on = False
        self._sampler = LineSampler(
            threading.get_ident(), self._take, profiles.opened.last_path, self._is_on, root=root
        )

    def start(self) -> None:
        self._sampler.start()

    def _is_on(self) -> bool:
        is_on = self._profiles.is_on
        if self._was_on and not is_on:
            self._write()
        self._was_on = is_on
        return is_on

    def _take(
        self, at: int, late: int, described: Described, ran: int, delayed: int, garbage: int
    ) -> None:
        ns = int(MEAN_INTERVAL_S * 1e9) + late
        self._whole_ns += ns
        places, activity, _ = described
        if not places and activity == Activity.WAIT:
            return  # the worker has nothing to do
        if len(self._sums) < MAX_SUMS or described in self._sums:
            sums = self._sums.setdefault(described, [0, 0, 0])
            for at_index, value in enumerate((1, ns, ran)):
                sums[at_index] += value

    def end(self) -> None:
        self._sampler.stop()
        if self._was_on:
            self._write()

    def _write(self) -> None:
        stacks = [(*described, *sums) for described, sums in self._sums.items()]
        write_json(self._profiles.file_of(os.getpid()), {"ns": self._whole_ns, "stacks": stacks})


# Count how often lines of chosen functions are executed in one step.
#
# A line that runs thousands of times in a step, a few microseconds each, is a Python loop, whatever
# operators it calls. Counting slows these functions down, so it is done in a step that is not
# measured.


MAX_COUNTED = 200_000  # executions; then counting ends, which bounds what it costs


class ExecutionCounter:
    """Counter of executed lines in the calling thread, from start() to stop().

    Args:
        functions: File and qualified name of each function to count.
    """

    def __init__(self, functions: set[tuple[str, str]]) -> None:
        self.counts: dict[Place, int] = {}
        self._functions, self._total = functions, 0
        self._is_on = False

    def start(self) -> None:
        """Begin to count, unless a debugger or a coverage tool traces the thread."""
        if not self._functions or sys.gettrace() is not None:
            return
        self._is_on = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # functions that run already
            if (frame.f_code.co_filename, function_name(frame.f_code)) in self._functions:
                frame.f_trace = self._count
            frame = frame.f_back
        sys.settrace(self._enter)

    def stop(self) -> None:
        if self._is_on:
            self._is_on = False
            if getattr(sys.gettrace(), "__self__", None) is self:
                sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if (code.co_filename, function_name(code)) not in self._functions:
            return None
        return self._count(frame, "line", arg)

    def _count(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._is_on:
            frame.f_trace = None
            return None
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno, function_name(frame.f_code))
            self.counts[place] = self.counts.get(place, 0) + 1
            self._total += 1
            if self._total >= MAX_COUNTED:
                self.stop()
        return self._count


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
