"""Carries out a rung of ``paceline diagnose`` in a rank, by the same seams that the recorder
listens to. After so many steps the process ends, without the script's own ending."""

import copy
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .collectives import RecordedGroup
from .imports import after_import
from .recorder import Recorder
from .rung import CACHED, LOADER, SILENT, Rung
from .scratch import Scratch
from .silent import Silent
from .tell import say, to_launcher

KEPT = 8  # batches of a dataset that are kept, and given in turns
LOADER_SECONDS = 2.0  # that a loader is asked at most


class Climber:
    """Carries a rung out in this process."""

    def __init__(self, rung: Rung, recorder: Recorder) -> None:
        self.rung, self.recorder = rung, recorder
        self._phase = rung.phases[0]
        self._kept: dict[int, list[_Batch]] = {}  # by dataset
        self._turn = 0
        self._told: dict[str, Any] = {"cached": 0, "silent": 0}

    def install(self) -> None:
        """Before the recorder's own hooks, which then lie outside of these."""
        after_import({"torch.utils.data.dataloader": self._loaders})
        if self.rung.scratch:
            self._scratch = Scratch(Path(self.rung.scratch), self._stop)
            self._scratch.install()

    def place(self, path: str | Path) -> Path:
        """Where a checkpoint's folder is, while this is an experiment."""
        return Path(self.rung.scratch) / Path(path).name

    def after_step(self) -> None:
        """Called at the end of every step of the job."""
        number = self.rung.at(self.recorder.step)
        if number == len(self.rung.phases):
            self._finish()
        phase = self.rung.phases[number]
        if phase != self._phase:
            self._phase = phase
            if phase == SILENT:
                self._silence()

    # the loader

    def _loaders(self, module: Any) -> None:
        kind, loader = module._BaseDataLoaderIter, module.DataLoader
        fetch, make = kind.__next__, loader.__iter__

        def next_batch(iterator: Any) -> Any:
            if self._phase == LOADER:
                loader = iterator._paceline_loader
                asked = make(loader) if isinstance(iterator, FromMemory) else iterator
                self._ask(asked, fetch, lambda: make(loader))
            kept = self._kept.get(id(iterator._dataset), [])
            if not (self._from_memory() and kept):
                batch = fetch(iterator)
                if len(kept) < KEPT and self.recorder.step < self.rung.warm:
                    kept.append(_Batch(batch))
                    self._kept[id(iterator._dataset)] = kept
                return batch
            given = iterator.__dict__.setdefault("_paceline_given", iterator._num_yielded)
            if given >= _length(iterator):
                raise StopIteration
            iterator._paceline_given += 1
            self._told["cached"] += 1
            self._turn += 1
            return kept[self._turn % len(kept)].given()

        class FromMemory(kind):  # type: ignore[misc, valid-type]
            """In the place of an iterator with workers that nobody would ask."""

            def __init__(self, loader: Any) -> None:
                self._dataset, self._num_yielded = loader.dataset, 0
                self._paceline_loader = loader

            def __len__(self) -> int:
                return len(self._paceline_loader)

        def new_iterator(asked: Any) -> Any:
            if self._from_memory() and id(asked.dataset) in self._kept:
                return FromMemory(asked)
            made = make(asked)
            made._paceline_loader = asked
            return made

        kind.__next__, loader.__iter__ = next_batch, new_iterator

    def _from_memory(self) -> bool:
        return self._phase in (CACHED, SILENT)

    def _ask(self, iterator: Any, fetch: Callable[[Any], Any], again: Callable[[], Any]) -> None:
        """Batch after batch, epoch after epoch, and then the end."""
        start, busy = time.perf_counter(), _busy()
        times: list[float] = []
        while len(times) < self.rung.steps and time.perf_counter() - start < LOADER_SECONDS:
            before = time.perf_counter()
            try:
                fetch(iterator)
            except StopIteration:
                iterator = again()
                fetch(iterator)
            times.append(time.perf_counter() - before)
        self._told["loader"] = {
            "batches": len(times),
            "seconds": sum(times),
            "busy_s": _busy() - busy,
            "workers": len(_children()),
        }
        self._finish()

    # the exchange

    def _silence(self) -> None:
        from torch.distributed.distributed_c10d import _world

        for group in list(_world.pg_map):
            if isinstance(group, RecordedGroup):
                group.inner = Silent(group.inner)  # type: ignore[assignment]
                group._agreement = None
                self._told["silent"] += 1

    def _stop(self, why: str) -> NoReturn:
        """The script is about to change a file of the user's."""
        self._told["stopped"] = why
        say(f"paceline: stopped: {why}\n")
        self._finish()

    def _finish(self) -> NoReturn:
        """The end of this process: nothing of the script runs any more, no exit handler either."""
        from .attach import detach

        self.recorder.tell(rung=self._told)
        detach()
        if self.rung.scratch:
            self._scratch.over = True
            shutil.rmtree(self.rung.scratch, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        to_launcher(finished=0)
        os._exit(0)


def _children() -> list[str]:
    """Processes that this one has started: a loader's workers."""
    try:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:
        return []


def _busy() -> float:
    """Seconds of processor time, of this process and its children that run."""
    ticks = 0
    for pid in (str(os.getpid()), *_children()):
        try:
            after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(after[11]) + int(after[12])
        except (OSError, ValueError, IndexError):  # it has just ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


class _Batch:
    """A batch that is given again and again, whatever the script does with it."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._pristine = _mapped(batch, _copied)
        self._versions = _versions(batch)

    def given(self) -> Any:
        """In containers of its own, whose tensors are as they came from the loader."""
        if _versions(self._batch) != self._versions:  # changed in place by the script
            self._batch = _mapped(self._pristine, _copied)
            self._versions = _versions(self._batch)
        return _mapped(self._batch, lambda leaf: leaf)


def _mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(function, batch)


def _versions(batch: Any) -> list[int]:
    from torch.utils._pytree import tree_leaves

    return [getattr(leaf, "_version", 0) for leaf in tree_leaves(batch)]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if hasattr(leaf, "clone") else copy.copy(leaf)


def _length(iterator: Any) -> float:
    try:
        return float(len(iterator))
    except TypeError:  # a stream
        return float("inf")
