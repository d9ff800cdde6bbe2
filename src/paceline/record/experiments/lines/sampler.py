"""Sampler of a thread's stack, which books the time of each sample to a line without bias.

A sampler that needs the interpreter lock runs only when the sampled thread releases it. Three
things keep the shares right all the same:

- The time to the next sample is random and almost memoryless (exponential), so samples cannot fall
  into step with the training.
- A sample stands for the mean time between samples plus its own delay. A call of C that holds the
  lock delays the sampler to its end, so the delay is the call's time. The time before the sample
  was due is not only this line's: booking the whole time since the previous sample to it would
  favour long calls.
- Python code keeps the lock for the switch interval (5 ms) when another thread asks for it. In that
  time the thread may reach an operator of torch, which releases the lock, and the sample would be
  that operator's. While the sampler runs, the switch interval is therefore short, and the timer of
  the sampler's thread is exact: Linux lets threads sleep 50 us longer by default.
"""

import contextlib
import ctypes
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any

from ...ring.core_wait import native_thread_id
from ...ring.launcher_messages import notify
from ...ring.recorder import now
from .activity import Described, StackDescriber
from .sidecar import Activity

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

    def _sample(self, schedule: "ThreadSchedule") -> None:
        ran, delayed = schedule.read()
        least, most = (self._interval_s * x for x in (MIN_INTERVAL_SHARE, MAX_INTERVAL_SHARE))
        rate = 1 / (self._interval_s - least)
        while True:
            interval = min(least + self._random.expovariate(rate), most)
            due = now() + int(interval * 1e9)
            if self._end.wait(interval):
                return
            at = now()
            if not self._is_on():
                ran, delayed = schedule.read()
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
            ran, delayed = schedule.read()
            self._take(
                at,
                max(at - due, 0),
                (places, activity, what),
                ran - ran_before,
                delayed - delayed_before,
                garbage,
            )


class ThreadSchedule:
    """Reader of a thread's time on a core, and of its time of waiting for one (ns)."""

    def __init__(self, ident: int) -> None:
        task = native_thread_id(ident) or os.getpid()
        self._fd = -1
        try:
            self._fd = os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not Linux, or a kernel without it: both times remain 0
            pass

    def read(self) -> tuple[int, int]:
        try:
            ran, waited, _ = os.pread(self._fd, 96, 0).split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            return 0, 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
