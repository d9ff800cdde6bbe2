"""One collective of this rank from its launch to its completion: its events, and its ``Work``."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist

from ..ring.recorder import Recorder, now
from ..ring.states import Op, State
from .collective_check import PendingCheck
from .hook_failures import report_failure

LONG_CALL_NS = 20_000  # a launching call that takes longer has a separate event
# Maximum time from a call's return to the wait for it in a synchronous call.
SYNCHRONOUS_WAIT_NS = 50_000
# By whether another thread than the training one is meant; ints are faster than enum members.
BLOCKED = (int(State.BLOCKED), int(State.BACKGROUND_BLOCKED))
COLLECTIVE = (int(State.COLLECTIVE), int(State.BACKGROUND_COLLECTIVE))
# PyTorch before 2.9 keeps only the C++ half of a Work that is made in Python.
KEEPS_PYTHON_WORK = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
COLLECTIVES_HOOK = "the collectives"
_current_backward = torch._C._current_graph_task_id


def is_in_background(recorder: Recorder) -> bool:
    """Return whether the calling thread is not the one that trains.

    A thread of autograd's engine belongs to the training, and one for which the training waits.
    """
    own = get_ident()
    if own in (recorder.training_thread, recorder.deputy_thread):
        return False
    return _current_backward() == -1


@dataclass(slots=True, eq=False)
class CollectiveInFlight:
    """One collective of this rank, from its launch to its last event (times in ns).

    Attributes:
        called: Later than ``launched`` after a check, which has an event.
        returned: End of the launching call; 0: its time is recorded.
        in_background: Whether another thread than the training one has launched it.
        on_end: Called when the result is known.
    """

    recorder: Recorder
    launched: int
    called: int
    returned: int
    amount: int
    seq: int
    group: int
    op: int
    peer: int
    in_background: bool = False
    is_done: bool = False
    on_end: Callable[[], None] | None = None

    def _event(self, state: int, start: int, end: int) -> None:
        self.recorder.event(
            state, start, end, self.amount, self.seq, self.group, self.op, self.peer
        )

    def _record_long_call(self) -> None:
        """Record the launching call as CALL, if it was long and no wait followed at once."""
        if self.returned - self.called > LONG_CALL_NS and not self.in_background:
            self._event(State.CALL, self.called, self.returned)
        self.returned = 0

    def begin_wait(self, since: int, in_background: bool) -> None:
        """Mark that the rank begins to wait for the collective."""
        self.recorder.begin(BLOCKED[in_background], since, self.seq, self.group, self.op)

    def end_wait(self, start: int, end: int, in_background: bool) -> None:
        """Record that a thread of the rank waited for the result from ``start`` to ``end``.

        A wait right after the call counts from the beginning of the call.
        """
        if start - self.returned < SYNCHRONOUS_WAIT_NS:
            start, self.returned = self.called, 0
        self._event(BLOCKED[in_background], start, end)
        self.finish(end)

    def finish(self, end: int) -> None:
        if not self.is_done:
            self.is_done = True
            if self.returned:
                self._record_long_call()
            self._event(COLLECTIVE[self.in_background], self.launched, end)
            if self.on_end is not None:
                self.on_end()


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
    *("block_current_stream", "get_future_result", "boxed", "_get_op_type", "_source_rank"),
    "_get_duration",
):
    if hasattr(dist.Work, _name):
        setattr(RecordedWork, _name, _delegated(_name))
