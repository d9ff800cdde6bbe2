"""One collective of this rank between its launch and its completion, and the events of both."""

from ..ring.recorder import Recorder
from ..ring.states import State

LONG_CALL_NS = 20_000  # a launching call that takes longer has a separate event
# Maximum time from a call's return to the wait for it in a synchronous call.
SYNCHRONOUS_WAIT_NS = 50_000
_BLOCKED = int(State.BLOCKED)  # faster than the enum member


class CollectiveInFlight:
    """One collective of this rank, from its launch to its last event (times in ns)."""

    __slots__ = (
        *("amount", "called", "group", "is_done", "launched", "op", "peer", "recorder"),
        *("returned", "seq"),
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
    ) -> None:
        self.recorder = recorder
        self.launched = launched
        self.called = called  # later than launched after a check, which has an event
        self.returned = returned  # end of the launching call; 0: its time is recorded
        self.amount, self.seq, self.group, self.op, self.peer = amount, seq, group, op, peer
        self.is_done = False

    def _event(self, state: int, start: int, end: int) -> None:
        self.recorder.event(
            state, start, end, self.amount, self.seq, self.group, self.op, self.peer
        )

    def _record_long_call(self) -> None:
        """Record the launching call as CALL, if it was long and no wait followed at once."""
        if self.returned - self.called > LONG_CALL_NS:
            self._event(State.CALL, self.called, self.returned)
        self.returned = 0

    def begin_wait(self, since: int) -> None:
        """Mark that the rank begins to wait for the collective."""
        self.recorder.begin(_BLOCKED, since, self.seq, self.group, self.op)

    def end_wait(self, start: int, end: int) -> None:
        """Record that the rank waited for the result from ``start`` to ``end``.

        A wait right after the call counts from the beginning of the call.
        """
        if start - self.returned < SYNCHRONOUS_WAIT_NS:
            start, self.returned = self.called, 0
        self._event(State.BLOCKED, start, end)
        self.finish(end)

    def finish(self, end: int) -> None:
        if not self.is_done:
            self.is_done = True
            if self.returned:
                self._record_long_call()
            self._event(State.COLLECTIVE, self.launched, end)
