"""Carries out a rung of ``paceline diagnose`` in a rank, by the same seams that the recorder
listens to. After so many steps the process ends, without the script's own ending."""

import functools
import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..hooks.collectives import RecordedGroup
from ..hooks.import_hooks import after_import
from ..ring.launcher_messages import notify, send_to_launcher
from ..ring.recorder import Recorder
from ..ring.resource_usage import (
    FileOpenCounter,
    bytes_read,
    child_pids,
    cpu_seconds,
    measure_open_s,
)
from .cached_batches import CachedBatches
from .no_communication import NoCommunicationGroup
from .observer import Observer
from .protect_files import FileProtection
from .rung import CHANNELS_LAST, EVERYTHING, LOADER, ONE_THREAD, SILENT, Rung

INSPECTED_STEPS = 2  # steps in which every module's call is looked at
MAX_LOADER_S = 2.0  # that a loader is asked at most


class Experiment:
    """Carries a rung out in this process."""

    def __init__(self, rung: Rung, recorder: Recorder, detach: Callable[[], None]) -> None:
        self.rung, self.recorder, self._detach = rung, recorder, detach
        self._phase = rung.phases[0]
        self._threads = 0  # that the rank computes with, while it computes with one
        self._observer = Observer()
        self._told: dict[str, Any] = {"silent": 0}
        self._lost, self._losses = 0.0, 0
        self._kept = CachedBatches(self._observer, self._keeping, self._from_memory, self._alone)

    def install(self) -> None:
        """Before the recorder's own hooks, which then lie outside of these."""
        self._observer.install()
        self._opens = FileOpenCounter()
        after_import({"torch.utils.data.dataloader": self._kept.install})
        if self.rung.losses:
            after_import({"torch": self._losing})
        if self.rung.scratch:
            self._scratch = FileProtection(Path(self.rung.scratch), self._stop)
            self._scratch.install()

    def place(self, path: str | Path) -> Path:
        """Where a checkpoint's folder is, while this is an experiment."""
        return Path(self.rung.scratch) / Path(path).name

    def after_step(self) -> None:
        """Called at the end of every step of the job."""
        step, number = self.recorder.step, self.rung.at(self.recorder.step)
        if self.rung.measures(step - 1):
            self._observer.after_step()
            if not self.rung.measures(step):
                self._observer.ends(self._phase)
                if self._phase == EVERYTHING:
                    self._told["workers"] = len(child_pids())
        if number == len(self.rung.phases):
            self._finish()
        phase = self.rung.phases[number]
        if phase != self._phase:
            self._leave(self._phase)
            self._phase = phase
            self._enter(phase)
        if step == min(INSPECTED_STEPS, self.rung.warm):
            self._observer.settled()
        if self.rung.measures(step) and not self.rung.measures(step - 1):
            self._observer.begins()

    def _enter(self, phase: str) -> None:
        import torch

        if phase == SILENT:
            self._silence()
        elif phase == ONE_THREAD:
            self._threads = torch.get_num_threads()
            inspect.unwrap(torch.set_num_threads)(1)  # also where a knob passes the script's over
        elif phase == CHANNELS_LAST:
            self._lay_out(torch.channels_last)

    def _leave(self, phase: str) -> None:
        import torch

        if phase == ONE_THREAD:
            inspect.unwrap(torch.set_num_threads)(self._threads)
        elif phase == CHANNELS_LAST:
            self._lay_out(torch.contiguous_format)
            self._kept.images = None

    def _lay_out(self, memory_format: Any) -> None:
        for ref in self._observer.convolutions:
            if (layer := ref()) is not None:
                layer.weight.data = layer.weight.data.contiguous(memory_format=memory_format)

        def images(leaf: Any) -> Any:
            fits = hasattr(leaf, "dim") and leaf.dim() == 4
            return leaf.contiguous(memory_format=memory_format) if fits else leaf

        self._kept.images = images

    def _losing(self, torch: Any) -> None:
        """Look at what is differentiated: a number is a loss."""
        backward = torch.Tensor.backward

        @functools.wraps(backward)
        def looked(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() == 1 and self.rung.measures(self.recorder.step):
                self._lost += float(tensor.detach())
                self._losses += 1
            return backward(tensor, *args, **kwargs)

        torch.Tensor.backward = looked

    # the loader

    def _keeping(self) -> bool:
        return self.recorder.step < self.rung.warm

    def _from_memory(self) -> bool:
        return self._phase not in (EVERYTHING, LOADER)

    def _alone(
        self, iterator: Any, fetch: Callable[[Any], Any], again: Callable[[], Any], empty: bool
    ) -> None:
        """Batch after batch, epoch after epoch, and then the end. empty: the iterator has none."""
        if self._phase != LOADER:
            return
        iterator = again() if empty else iterator
        start, before = time.perf_counter(), self._files()
        times: list[float] = []
        while len(times) < self.rung.steps and time.perf_counter() - start < MAX_LOADER_S:
            asked = time.perf_counter()
            try:
                fetch(iterator)
            except StopIteration:
                iterator = again()
                fetch(iterator)
            times.append(time.perf_counter() - asked)
        used = {name: now - before[name] for name, now in self._files().items()}
        found = {"batches": len(times), "seconds": sum(times), **used, "open_s": measure_open_s()}
        self._told["loader"] = found | {"workers": len(child_pids())}
        self._finish()

    def _files(self) -> dict[str, float]:
        """Of this process and its children that run: seconds of processors, those inside the
        kernel, bytes that were read, those of them from storage, and files that were opened."""
        pids = (str(os.getpid()), *child_pids())
        user, system = (sum(part) for part in zip(*map(cpu_seconds, pids), strict=True))
        read, stored = (sum(part) for part in zip(*map(bytes_read, pids), strict=True))
        return {
            "busy_s": user + system,
            "system_s": system,
            "read": read,
            "stored": stored,
            "opened": int(self._opens),
        }

    # the exchange

    def _silence(self) -> None:
        from torch.distributed.distributed_c10d import _world

        for group in list(_world.pg_map):
            if isinstance(group, RecordedGroup):
                group.inner = NoCommunicationGroup(group.inner)  # type: ignore[assignment]
                group._agreement = None
                self._told["silent"] += 1

    def _stop(self, why: str) -> NoReturn:
        """The script is about to change a file of the user's."""
        self._told["stopped"] = why
        notify(f"paceline: stopped: {why}\n")
        self._finish()

    def _finish(self) -> NoReturn:
        """The end of this process: nothing of the script runs any more, no exit handler either."""
        if "stopped" not in self._told:
            self._observer.closes()
        if self._losses:
            self._told["loss"] = self._lost / self._losses
        told = self._told | {"cached": self._kept.given} | self._observer.told
        self.recorder.update_header(rung=told)
        self._detach()
        if self.rung.scratch:
            self._scratch.over = True
            shutil.rmtree(self.rung.scratch, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        send_to_launcher(finished=0)
        os._exit(0)
