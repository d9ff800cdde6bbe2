"""Samples of the worker processes of a DataLoader, in which files are read and samples are made.

A worker samples its own main thread while the rank measures. It writes the sums into a file in the
job's folder when the measurement or the worker ends; the rank adds them to its profile.
"""

import mmap
import os
import threading
from pathlib import Path
from types import CodeType
from typing import Any

from ....security.files import read_regular
from ....security.schema import load_json
from ...hooks.taps import Function, Tap
from ...ring.recorder import Recorder
from ...ring.resource_usage import FileOpenCounter
from .activity import Described
from .sampler import MEAN_INTERVAL_S, LineSampler
from .sidecar import MAX_PROFILE_BYTES, MAX_WORKERS, Activity, WorkerTime, write_json
from .table import StackTable

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
                one = sums.setdefault(
                    number, {"stack": number, "samples": 0, "ns": 0, "on_core_ns": 0}
                )
                one["samples"] += samples
                one["ns"] += ns
                one["on_core_ns"] += on_core
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
