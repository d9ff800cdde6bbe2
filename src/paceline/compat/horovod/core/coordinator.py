"""Coordinate the operations of one process set on this rank, and execute them.

Operations are matched by name, in meetings of all ranks (``negotiation``). A rank enters a meeting
only if it has submitted something, has joined or leaves, and blocks in it until all others have
come. So ranks that compute use no core for the coordination.

**No deadlock.** A rank that has unfinished operations always comes to the next meeting, after a few
cycle times at most; if a thread waits for one of them, at once, or after one cycle time if the last
meeting made no progress. So a rank that waits in a meeting waits only for ranks that have nothing
submitted. These have to submit the missing operations, or to join or leave, for the others to
continue, and do so independently of this thread. In each meeting every rank contributes all that it
has submitted, so an operation is found ready in the first meeting after the last rank has submitted
it, in whatever order ranks submit. All ranks then execute the same operations in the same order
before the next meeting, and no other thread uses the process set's group.

**Who does it.** A thread that waits for an operation runs the meetings itself, so a call that waits
at once costs no switch between threads. A background thread does so while no thread waits: it first
collects submissions, so that they are exchanged together. With a time limit for operations that
some ranks do not submit, the background thread runs all meetings: not every transport can interrupt
one, and the threads that wait must be able to fail.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence

from ....plurals import named_ranks
from ....record.hooks.error_messages import NAMED_PEER_GONE
from .. import timeline
from ..environment import HorovodSettings
from .errors import HorovodInternalError, HorovodShutdownError
from .exchange import GroupMeetings
from .execute import Executor
from .negotiation import Decision, Fusion, Message, Negotiator
from .notices import Notices, StallMonitor
from .requests import Kind, Operation, Request

# While no thread waits for an operation, the background thread collects submissions until they have
# so many bytes, or for so many cycle times: a meeting costs as much for one operation as for many.
EARLY_BYTES, COLLECTED_CYCLES = 4 << 20, 5
LEAVE_TIMEOUT_S = 5.0  # for the last meeting, when this rank leaves
MIN_LEAVE_TIMEOUT_S = 0.2  # if an operation has failed, or ranks of another set did not come


class Coordinator:
    """The operations of one process set, of this rank.

    Args:
        rank: Index of this rank among ``members``.
        members: Global ranks.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        meetings: GroupMeetings,
        execute: Executor,
        settings: HorovodSettings,
        notices: Notices,
    ) -> None:
        self._negotiator = Negotiator(rank, members, settings.cache_capacity)
        self.members, self.size = list(members), len(members)
        self._meetings, self._execute = meetings, execute
        self._settings, self._notices = settings, notices
        self._stalls = StallMonitor(
            self.members[rank],
            notices,
            self._submission_times,
            lambda: self._negotiator.joined,
            self._stop,
            settings.stall_check_s if settings.prints("WARNING") else 0.0,
            settings.stall_shutdown_s,
        )
        self._operations: dict[str, Operation] = {}
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)  # for threads that wait for an operation
        self._work = threading.Condition(self._lock)  # for the background thread
        self._is_meeting = False  # a thread runs a meeting
        self._has_new = False  # submitted since the last meeting began
        self._new_bytes = 0  # the same, by threads that did not wait for them next
        self._waiting_threads = 0
        self._is_closing = self._is_resting = False
        self._meets_in_thread = settings.stall_shutdown_s > 0  # never in a thread that waits
        self._cycle_s = settings.cycle_s
        self._failure: Exception | None = None
        self._last_joined: int | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def submit(self, operations: Sequence[Operation], waits: bool = False) -> None:
        """Submit operations of different names.

        Args:
            waits: Whether this thread calls ``wait`` next.

        Raises:
            ValueError: An operation of one of these names is in progress. None is submitted.
            HorovodInternalError: A rank has ended or left.
        """
        self._check_process()
        self._execute.prepare(operations)
        if self.size == 1:
            for operation in operations:
                self._execute_alone(operation)
            return
        added = {operation.request.name: operation for operation in operations}
        with self._lock:
            self._raise_failure()
            for name in added.keys() & self._operations.keys():
                raise ValueError(
                    f"{added[name].request.kind.name.lower()} {name!r}: Requested to collect a "
                    "tensor with the same name as another tensor that is currently being "
                    "processed. HINT: give each call its own name=, or synchronize() the first "
                    "handle before the second call"
                )
            self._operations |= added
            for operation in operations:
                self._negotiator.submit(operation.request)
            self._has_new = True
            if self._thread is None:
                self._start_threads()
            if not waits:
                was_enough = self._new_bytes >= EARLY_BYTES
                self._new_bytes += sum([operation.request.nbytes for operation in operations])
                if not was_enough and self._new_bytes >= EARLY_BYTES and not self._is_resting:
                    self._work.notify()
                self._wake_thread()

    def wait(self, operations: Sequence[Operation]) -> None:
        """Wait until operations are done.

        Raises:
            HorovodInternalError: One failed.
        """
        unfinished = [operation for operation in operations if not operation.is_done]
        if unfinished:
            self._check_process()

            def are_done() -> bool:
                while unfinished and unfinished[-1].is_done:
                    unfinished.pop()
                return not unfinished

            self._coordinate_until(are_done)
        for operation in operations:
            if operation.error is not None:
                raise operation.error
        self._execute.follow(operations)

    def join(self) -> int:
        """Contribute zeros to the other ranks' all-reduces until all have joined.

        Returns:
            The global rank that joined last.
        """
        self._check_process()
        if self.size == 1:
            return self.members[0]
        with self._lock:
            self._raise_failure()
            self._last_joined = None
            self._negotiator.wants_join = self._has_new = True
        self._coordinate_until(lambda: self._last_joined is not None)
        if self._last_joined is None:
            self._raise_failure()
        assert self._last_joined is not None
        return self._last_joined

    def change(self, fusion: Fusion) -> None:
        """Let all ranks use other settings, from this rank's next meeting on.

        Only the first rank of the process set may call it.
        """
        with self._lock:
            self._negotiator.wants_fusion = fusion

    def close(self, timeout_s: float = LEAVE_TIMEOUT_S) -> bool:
        """Tell the other ranks that this rank leaves; their unfinished operations fail.

        timeout_s: for ranks that do not come to a meeting.

        Return whether no thread uses the process group any more.
        """
        if self._pid != os.getpid() or self.size == 1:
            return self.size == 1
        self._stalls.end()
        self._notices.write_left()
        with self._lock:
            self._is_closing = True
            self._work.notify_all()
            patience_s = timeout_s if self._failure is None else MIN_LEAVE_TIMEOUT_S
            is_free = self._progress.wait_for(lambda: not self._is_meeting, patience_s)
            if self._failure is None and is_free:
                self._negotiator.wants_leave = True
                self._meetings.limit(timeout_s)
                self._execute.exchange.begin_wait()
                self._meet_unlocked()
                self._execute.exchange.end_wait()
        if is_free and self._thread is not None:
            self._thread.join(timeout_s)
            is_free = not self._thread.is_alive()
        return is_free

    # Implementation. Where a method says so, the lock is held.

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise HorovodInternalError(
                "this process was forked from a rank and can't call Horovod's collectives. HINT: "
                "call them in the rank, not in a worker of the DataLoader"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _execute_alone(self, operation: Operation) -> None:
        try:
            self._execute([(operation.request, operation)])
            operation.finish()
        except Exception as error:
            operation.finish(HorovodInternalError(str(error)))

    def _start_threads(self) -> None:
        self._thread = threading.Thread(target=self._run, name="paceline-horovod", daemon=True)
        self._thread.start()
        if self._settings.stall_check_s or self._settings.stall_shutdown_s:
            self._stalls.start()

    def _submission_times(self) -> dict[str, int]:
        """Return the names of unfinished operations, with the times of their submission (ns)."""
        with self._lock:
            return {name: one.submitted_ns for name, one in self._operations.items()}

    def _stop(self, reason: str) -> None:
        """Fail all operations, from another thread than the one that waits for ranks."""
        self._fail(HorovodInternalError(reason))
        self._meetings.abort()

    def _wake_thread(self) -> None:
        """Let the background thread run meetings. The lock is held."""
        if self._is_resting and (self._meets_in_thread or not self._waiting_threads):
            self._is_resting = False
            self._work.notify()

    def _coordinate_until(self, is_done: Callable[[], bool]) -> None:
        """Run meetings, or wait for the thread that does, until a condition holds."""
        self._execute.exchange.begin_wait()
        with self._lock:
            self._waiting_threads += 1
            if self._meets_in_thread:
                if self._thread is None:
                    self._start_threads()
                self._work.notify()
            try:
                while not is_done() and self._failure is None:
                    if self._is_meeting or self._meets_in_thread:
                        self._progress.wait()
                    elif not self._meet_unlocked():
                        self._await_news()
            finally:
                self._waiting_threads -= 1
                if not self._waiting_threads and self._negotiator.has_business:
                    self._wake_thread()
        self._execute.exchange.end_wait()

    def _run(self) -> None:
        """Run meetings while no thread waits for an operation, or all of them."""
        with self._lock:
            while not self._is_closing and self._failure is None:
                if not self._may_meet():
                    self._is_resting = True
                    self._work.wait()
                    self._is_resting = False
                    continue
                # Operations that are submitted together are exchanged together.
                self._work.wait_for(self._has_collected, COLLECTED_CYCLES * self._cycle_s)
                if self._may_meet() and not self._meet_unlocked() and self._waiting_threads:
                    self._await_news()

    def _may_meet(self) -> bool:
        return not (self._is_meeting or self._is_not_needed()) and self._negotiator.has_business

    def _has_collected(self) -> bool:
        has_collected = self._new_bytes >= EARLY_BYTES or self._waiting_threads > 0
        return has_collected or self._is_not_needed()

    def _is_not_needed(self) -> bool:
        has_ended = self._is_closing or self._failure is not None
        return has_ended or (self._waiting_threads > 0 and not self._meets_in_thread)

    def _await_news(self) -> None:
        """Wait for a submission, or for the cycle time: ranks wait for different operations.

        The lock is held.
        """
        self._progress.wait_for(
            lambda: self._has_new or self._is_closing or self._is_meeting, self._cycle_s
        )

    def _meet_unlocked(self) -> bool:
        """Run a meeting in this thread; return whether there was progress.

        The lock is held, and released meanwhile.
        """
        self._is_meeting = True
        self._has_new = False
        self._new_bytes = 0
        vector = self._negotiator.vector()
        self._lock.release()
        try:
            made_progress = self._meet(vector)
        finally:
            self._lock.acquire()
            self._is_meeting = False
            self._progress.notify_all()
        return made_progress

    def _meet(self, vector: bytearray) -> bool:
        """Meet the other ranks, and execute what is ready; return whether there was progress."""
        negotiator = self._negotiator
        begun_ns = time.monotonic_ns()
        try:
            self._meetings.minimum(vector)
            messages: list[Message] | None = None
            if not vector[0]:
                with self._lock:
                    message = negotiator.message()
                messages = self._meetings.gather(message)
            with self._lock:
                decision = negotiator.decide(vector, messages)
                ready = [(one, self._operations.get(one.name)) for one in decision.ready]
            if decision.fusion is not None:
                self._execute.fusion_bytes = decision.fusion.fusion_bytes
                self._cycle_s = decision.fusion.cycle_s
            decided_ns = time.monotonic_ns()
            if ready:
                self._execute(ready)
            if timeline.active is not None:
                self._draw(timeline.active, begun_ns, decided_ns, messages, ready)
        except Exception as error:
            self._fail(self._explained(error))
            return True
        except BaseException:  # the other ranks go on without this rank's part
            self._fail(HorovodInternalError("a meeting of the ranks was interrupted on this rank"))
            raise
        if len(decision.left) == self.size:
            self._execute.all_left(begun_ns)
        self._note(decision)
        return bool(decision.ready or decision.errors or decision.had_news)

    def _draw(
        self,
        drawn: timeline.Timeline,
        begun_ns: int,
        decided_ns: int,
        messages: list[Message] | None,
        ready: Sequence[tuple[Request, Operation | None]],
    ) -> None:
        """Write a meeting, and the operations that followed it, to the timeline."""
        drawn.cycle(begun_ns)
        now = time.monotonic_ns()
        for member, message in zip(self.members, messages or (), strict=False):
            for request in message.requests:
                drawn.ready(request.name, member, decided_ns)
        for request, operation in ready:
            kind, submitted_ns = request.kind.name, begun_ns
            if operation is not None:
                submitted_ns = operation.submitted_ns
            drawn.slice(request.name, timeline.NEGOTIATE + kind, submitted_ns, decided_ns)
            drawn.slice(
                *(request.name, kind, decided_ns, now),
                dtype=", ".join(dict.fromkeys(request.dtypes)),
                shape=str([list(shape) for shape in request.shapes]),
            )

    def _note(self, decision: Decision) -> None:
        with self._lock:
            for request in decision.ready:
                if (operation := self._operations.pop(request.name, None)) is not None:
                    operation.is_done = True
            for name, reason in decision.errors.items():
                if (operation := self._operations.pop(name, None)) is not None:
                    operation.finish(HorovodInternalError(reason))
            if decision.last_joined is not None:
                self._last_joined = decision.last_joined
        if decision.left:
            self._fail(shutdown_error(decision.left))

    def _explained(self, error: Exception) -> HorovodInternalError:
        """Return the error of the operations, for one of a meeting or of the exchange."""
        if left := self._notices.read_left():
            return shutdown_error(left)
        text = str(error)
        place = text.find(NAMED_PEER_GONE)
        if place >= 0:  # it names the collective of the meeting
            names = sorted(self._operations)
            which = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
            text = f"Horovod's operation {which or 'join'} {text[place:]}"
        return HorovodInternalError(text)

    def _fail(self, error: Exception) -> None:
        """Fail all operations, also those that are submitted later."""
        with self._lock:
            self._failure = self._failure or error
            for operation in self._operations.values():
                operation.finish(type(error)(*error.args))
            self._operations.clear()
            self._work.notify_all()
            self._progress.notify_all()


def shutdown_error(left: Sequence[int]) -> HorovodShutdownError:
    """Return the error of operations that these ranks can't complete, because they have left."""
    have = "has" if len(left) == 1 else "have"
    return HorovodShutdownError(
        f"Horovod has been shut down: {named_ranks(left)} {have} called hvd.shutdown() or ended. "
        "HINT: give all ranks as many batches, or call hvd.join() on a rank that has no more data, "
        "and the same collectives on all ranks"
    )


def agreement(name: str, detail: str) -> Operation:
    """Return an operation that exchanges nothing: all ranks must submit the same ``detail``."""
    return Operation(Request(name, Kind.PROCESS_SET, detail=detail, is_named=False))
