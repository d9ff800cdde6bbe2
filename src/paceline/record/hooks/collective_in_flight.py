"""One collective of this rank between its launch and its completion, and the events of both."""

from collections.abc import Callable
from threading import get_ident

import torch

from ..ring.recorder import Recorder
from ..ring.states import State

LONG_CALL_NS = 20_000  # a launching call that takes longer has a separate event
# Maximum time from a call's return to the wait for it in a synchronous call.
SYNCHRONOUS_WAIT_NS = 50_000
# By whether another thread than the training one is meant; ints are faster than enum members.
BLOCKED = (int(State.BLOCKED), int(State.BACKGROUND_BLOCKED))
COLLECTIVE = (int(State.COLLECTIVE), int(State.BACKGROUND_COLLECTIVE))
_current_backward = torch._C._current_graph_task_id


def is_in_background(recorder: Recorder) -> bool:
    """Return whether the calling thread is not the one that trains.

    A thread of autograd's engine belongs to the training.
    """
    return get_ident() != recorder.training_thread and _current_backward() == -1


class CollectiveInFlight:
    """One collective of this rank, from its launch to its last event (times in ns)."""

    __slots__ = (
        *("amount", "called", "group", "in_background", "is_done", "launched", "op", "peer"),
        *("on_end", "recorder", "returned", "seq"),
    )

    def __init__(
        self,
        recorder: Recorder,
        launched: int,
        called: int,
        returned: int,
        amount: int,
        seq: int,
        group: int,
        op: int,
        peer: int,
        in_background: bool = False,
    ) -> None:
        self.recorder = recorder
        self.launched = launched
        self.called = called  # later than launched after a check, which has an event
        self.returned = returned  # end of the launching call; 0: its time is recorded
        self.amount, self.seq, self.group, self.op, self.peer = amount, seq, group, op, peer
        self.in_background = in_background  # launched by another thread than the training one
        self.is_done = False
        self.on_end: Callable[[], None] | None = None  # called when the result is known

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
