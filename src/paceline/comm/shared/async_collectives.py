"""Asynchronous collectives: one thread for each process group executes them in their order."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ...record.pending_value import completed_future

Run = Callable[[], None]
EXIT_TIMEOUT_S = 2.0  # for pending collectives, at the interpreter's exit


class ExchangeWork(dist.Work):
    """What all works of Paceline have in common; they define ``wait`` and ``is_completed``."""

    _error: BaseException | None = None

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._result


class CompletedWork(ExchangeWork):
    """Work of a collective that had ended when its call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return completed_future(self._result)


class PendingWork(ExchangeWork):
    """Work of a collective that the thread executes.

    Its future always completes: with the result, or with the exception that the collective raised.
    """

    def __init__(self, run: Run, result: list[torch.Tensor]) -> None:
        super().__init__(result)
        self._start: torch.futures.Future[None] = torch.futures.Future()

        def run_collective(_: Any) -> list[torch.Tensor]:
            try:
                run()
            except BaseException as error:
                self._error = error
                raise
            return result

        # An exception that a callback raises is an error for callers that wait in C++ as well
        # (DDP's reducer). With set_exception it would be an ordinary value there.
        self._future = self._start.then(run_collective)

    def execute(self) -> None:
        self._start.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class CollectiveThread:
    """Executes pending works in the order in which they were submitted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[PendingWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: PendingWork | None = None

    @property
    def idle(self) -> bool:
        return self._last is None or self._last.is_completed()

    def submit(self, work: PendingWork) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            _running.add(self)
        self._last = work
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.execute()
            del work  # frees its tensors as well

    def close(self, timeout_s: float) -> None:
        """Stop after the works that were submitted; wait at most ``timeout_s`` seconds."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._thread = self._last = None


_running: "weakref.WeakSet[CollectiveThread]" = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """Let the threads end before the interpreter does.

    A thread that still returns from PyTorch's futures would abort the process.
    """
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for thread in list(_running):
        thread.close(max(deadline - time.monotonic(), 0.0))
