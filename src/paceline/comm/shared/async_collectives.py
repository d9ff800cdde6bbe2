"""Collectives that go on beside the training: one thread a group, which keeps their order."""

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

Run = Callable[[], None]


class Done(dist.Work):
    """Of a collective that was over when its call returned."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        pass

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class Going(dist.Work):
    """Of one that the worker carries out. Its future ends in any case, with the error if there
    is one."""

    def __init__(self, run: Run, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result, self._error = result, None
        self._start: torch.futures.Future[None] = torch.futures.Future()

        def carried_out(_: Any) -> list[torch.Tensor]:
            try:
                run()
            except BaseException as error:
                self._error = error
                raise
            return result

        # What a callback raises is an error to those who wait in C++ as well (DDP's reducer); an
        # exception that is set by hand would be a value there.
        self._future = self._start.then(carried_out)

    def carry_out(self) -> None:
        self._start.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Worker:
    """Carries works out, one after another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Going | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Going | None = None

    @property
    def idle(self) -> bool:
        return self._last is None or self._last.is_completed()

    def put(self, work: Going) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._last = work
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.carry_out()
            del work  # and its tensors

    def close(self, seconds: float) -> None:
        """After what was put, for so long at most."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds)
            self._thread = self._last = None
