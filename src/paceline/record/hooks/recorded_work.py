"""The ``Work`` of a recorded collective: it records how long the rank waits for it."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..ring.recorder import now
from ..ring.states import Op
from .collective_check import PendingCheck
from .collective_in_flight import CollectiveInFlight, is_in_background
from .hook_failures import report_failure

# PyTorch before 2.9 keeps only the C++ half of a Work that is made in Python.
KEEPS_PYTHON_WORK = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
COLLECTIVES_HOOK = "the collectives"


class RecordedWork(dist.Work):
    """A ``Work`` that records how long ``wait`` blocked, and delegates everything else."""

    def __init__(
        self,
        work: dist.Work,
        in_flight: CollectiveInFlight,
        group: Any,  # a RecordedGroup
        check: PendingCheck | None = None,
    ) -> None:
        super().__init__()
        self._work = work
        self._in_flight = in_flight
        self._check = check  # of the ranks' arguments, if it has not ended yet
        self._group = weakref.ref(group)

    def wait(self, *timeout: Any) -> bool:
        if self._in_flight.is_done:
            if self._check is not None:
                self._check.finish()
            return bool(self._work.wait(*timeout))
        start, in_background = now(), is_in_background(self._in_flight.recorder)
        self._in_flight.begin_wait(start, in_background)
        if self._check is not None:
            self._check.finish()
        done = self._work.wait(*timeout)
        end = now()
        try:
            if self._in_flight.op == Op.RECV and self._in_flight.peer < 0:
                self._set_sender()
            self._in_flight.end_wait(start, end, in_background)
            if not KEEPS_PYTHON_WORK and (group := self._group()) is not None:
                group.forget_finished()
        except Exception as error:
            report_failure(COLLECTIVES_HOOK, error)
        return bool(done)

    def _set_sender(self) -> None:
        """Set the sender of a receive from any rank, which is known after its completion."""
        group, in_flight = self._group(), self._in_flight
        if group is not None:
            in_flight.peer = self._work._source_rank()
            in_flight.seq = group.message_number(Op.RECV, in_flight.peer, in_flight.seq >> 20)

    def done(self) -> bool:
        """Return whether it is complete. Its end is now if it was not waited for."""
        if not self._in_flight.is_done and self._work.is_completed():
            self._in_flight.finish(now())
        return self._in_flight.is_done

    def get_future(self) -> torch.futures.Future[Any]:
        group = self._group()
        try:
            if group is not None and torch._C._current_graph_task_id() != -1:
                group.finish_after_backward(self._work, self._in_flight, self._check)
        except Exception as error:
            report_failure(COLLECTIVES_HOOK, error)
        return self._work.get_future()


def _delegated(name: str) -> Callable[..., Any]:
    def method(self: RecordedWork, *args: Any) -> Any:
        return getattr(self._work, name)(*args)

    method.__name__ = name
    return method


for _name in (
    *("is_completed", "is_success", "exception", "result", "synchronize", "source_rank"),
    *("block_current_stream", "get_future_result", "boxed", "_get_op_type"),
):
    if hasattr(dist.Work, _name):
        setattr(RecordedWork, _name, _delegated(_name))
