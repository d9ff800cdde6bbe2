"""Coordinate the operations of one process set on this rank, and execute them.

Operations are matched by name, in meetings of all ranks (``negotiation``). A rank enters a meeting
only if it has submitted something, has joined or leaves, and blocks in it until all others have
come. So ranks that compute use no core for the coordination.

**No deadlock.** A rank that has unfinished operations always comes to the next meeting: at once if
it has submitted anything since the last one or if the last one made progress, else after the cycle
time. So a rank that waits in a meeting waits only for ranks that have nothing submitted. These have
to submit the missing operations, or to join or leave, for the others to continue, and do so
independently of this thread. In each meeting every rank contributes all that it has submitted, so
an operation is found ready in the first meeting after the last rank has submitted it, in whatever
order ranks submit. All ranks then execute the same operations in the same order before the next
meeting, and no other thread uses the process set's group.

**Who does it.** A thread that waits for an operation runs the meetings itself, so a call that waits
at once costs no switch between threads. A background thread does so while no thread waits: it first
collects submissions for the cycle time, so that they are exchanged together.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ....plurals import named_ranks
from .errors import HorovodInternalError, HorovodShutdownError
from .negotiation import Decision, Message, Negotiator
from .operation import Operation
from .requests import Kind, Request
from .settings import Settings

LEAVE_TIMEOUT_S = 5.0  # for the last meeting, when this rank leaves


class Meetings(Protocol):
    """How the ranks of a process set meet."""

    def minimum(self, vector: bytearray) -> None:
        """Replace each byte of the vector by the smallest of all ranks."""

    def gather(self, message: Message) -> list[Message]:
        """Return the messages of all ranks."""

    def limit(self, seconds: float) -> None:
        """Set the time that the next meetings wait for late ranks."""


Execute = Callable[[Sequence[tuple[Request, Operation | None]]], None]


class Coordinator:
    """The operations of one process set, of this rank.

    Args:
        rank: Index of this rank among ``members``.
        members: Global ranks.
        execute: Executes operations that are ready on all ranks; None stands for an operation that
            this rank, which has joined, has not submitted.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        meetings: Meetings,
        execute: Execute,
        settings: Settings,
    ) -> None:
        self._negotiator = Negotiator(rank, members, settings.cache_capacity)
        self.members, self.size = list(members), len(members)
        self._meetings, self._execute = meetings, execute
        self._settings = settings
        self._operations: dict[str, Operation] = {}
        self._changed = threading.Condition()
        self._is_meeting = False  # a thread runs a meeting
        self._has_new = False  # submitted since the last meeting began
        self._waiting_threads = 0
        self._is_closing = False
        self._failure: Exception | None = None
        self._last_joined: int | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def submit(self, operation: Operation) -> None:
        """Submit an operation.

        Raises:
            ValueError: An operation of this name is in progress.
            HorovodInternalError: A rank has ended or left.
        """
        self._check_process()
        name = operation.request.name
        if self.size == 1:
            self._execute_alone(operation)
            return
        with self._changed:
            if self._failure is not None:
                raise type(self._failure)(*self._failure.args)
            if name in self._operations:
                raise ValueError(
                    f"{operation.request.kind.name.lower()} {name!r}: Requested to collect a "
                    "tensor with the same name as another tensor that is currently being "
                    "processed. HINT: give each call its own name=, or synchronize() the first "
                    "handle before the second call"
                )
            self._operations[name] = operation
            self._negotiator.submit(operation.request)
            self._has_new = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="paceline-horovod", daemon=True
                )
                self._thread.start()
            if not self._waiting_threads and len(self._operations) == 1:
                self._changed.notify_all()

    def wait(self, operation: Operation) -> None:
        """Wait until an operation is done.

        Raises:
            HorovodInternalError: It failed.
        """
        if not operation.is_done:
            self._check_process()
            self._coordinate_until(lambda: operation.is_done)
        if operation.error is not None:
            raise operation.error

    def join(self) -> int:
        """Contribute zeros to the other ranks' all-reduces until all have joined.

        Returns:
            The global rank that joined last.
        """
        self._check_process()
        if self.size == 1:
            return self.members[0]
        with self._changed:
            if self._failure is not None:
                raise type(self._failure)(*self._failure.args)
            self._last_joined = None
            self._negotiator.wants_join = self._has_new = True
        self._coordinate_until(lambda: self._last_joined is not None or self._failure is not None)
        if self._last_joined is None:
            assert self._failure is not None
            raise type(self._failure)(*self._failure.args)
        return self._last_joined

    def close(self) -> None:
        """Tell the other ranks that this rank leaves; their unfinished operations fail."""
        if self._pid != os.getpid() or self.size == 1:
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            is_free = self._changed.wait_for(lambda: not self._is_meeting, LEAVE_TIMEOUT_S)
            if self._failure is not None or not is_free:
                return
            self._is_meeting = self._negotiator.wants_leave = True
        self._meetings.limit(LEAVE_TIMEOUT_S)
        self._meet()
        with self._changed:
            self._is_meeting = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(LEAVE_TIMEOUT_S)

    # Implementation.

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise HorovodInternalError(
                "this process was forked from a rank and can't call Horovod's collectives. HINT: "
                "call them in the rank, not in a worker of the DataLoader"
            )

    def _execute_alone(self, operation: Operation) -> None:
        try:
            self._execute([(operation.request, operation)])
            operation.finish()
        except Exception as error:
            operation.finish(HorovodInternalError(str(error)))

    def _coordinate_until(self, is_done: Callable[[], bool]) -> None:
        """Run meetings, or wait for the thread that does, until a condition holds."""
        with self._changed:
            self._waiting_threads += 1
            try:
                while not is_done() and self._failure is None:
                    if self._is_meeting:
                        self._changed.wait()
                    else:
                        self._meet_now()
            finally:
                self._waiting_threads -= 1
                if not self._waiting_threads and self._operations:
                    self._changed.notify_all()

    def _run(self) -> None:
        """Run meetings while no thread waits for an operation."""

        def is_wanted() -> bool:
            return self._is_closing or self._failure is not None or self._waiting_threads > 0

        with self._changed:
            while not self._is_closing and self._failure is None:
                if self._is_meeting or self._waiting_threads or not self._has_business():
                    self._changed.wait()
                elif not self._changed.wait_for(is_wanted, self._settings.cycle_s):
                    self._meet_now()

    def _has_business(self) -> bool:
        return self._negotiator.has_business

    def _meet_now(self) -> None:
        """Run a meeting in this thread. The lock is held, and released meanwhile."""
        self._is_meeting = True
        self._has_new = False
        self._changed.release()
        try:
            made_progress = self._meet()
        finally:
            self._changed.acquire()
            self._is_meeting = False
            self._changed.notify_all()
        if not made_progress and self._failure is None:
            # Ranks wait for different operations: meet again when there is something new.
            self._changed.wait_for(
                lambda: self._has_new or self._is_closing, self._settings.cycle_s
            )

    def _meet(self) -> bool:
        """Meet the other ranks, and execute what is ready; return whether there was progress."""
        negotiator = self._negotiator
        try:
            with self._changed:
                vector = negotiator.vector()
            self._meetings.minimum(vector)
            messages: list[Message] | None = None
            if not vector[0]:
                with self._changed:
                    message = negotiator.message()
                messages = self._meetings.gather(message)
            with self._changed:
                decision = negotiator.decide(vector, messages)
                ready = [(one, self._operations.get(one.name)) for one in decision.ready]
            if ready:
                self._execute(ready)
        except Exception as error:
            self._fail(HorovodInternalError(str(error)))
            return True
        self._note(decision)
        return bool(decision.ready or decision.errors or decision.had_news)

    def _note(self, decision: Decision) -> None:
        with self._changed:
            for request in decision.ready:
                if (operation := self._operations.pop(request.name, None)) is not None:
                    operation.finish()
            for name, reason in decision.errors.items():
                if (operation := self._operations.pop(name, None)) is not None:
                    operation.finish(HorovodInternalError(reason))
            if decision.last_joined is not None:
                self._last_joined = decision.last_joined
        if decision.left:
            have = "has" if len(decision.left) == 1 else "have"
            self._fail(
                HorovodShutdownError(
                    f"Horovod has been shut down: {named_ranks(decision.left)} {have} called "
                    "hvd.shutdown() or ended. HINT: call hvd.join() on a rank that has no more "
                    "data, and the same collectives on all ranks"
                )
            )

    def _fail(self, error: Exception) -> None:
        """Fail all operations, also those that are submitted later."""
        with self._changed:
            self._failure = self._failure or error
            for operation in self._operations.values():
                operation.finish(type(error)(*error.args))
            self._operations.clear()
            self._changed.notify_all()


def agreement(name: str, detail: str) -> Operation:
    """Return an operation that exchanges nothing: all ranks must submit the same ``detail``."""
    return Operation(Request(name, Kind.PROCESS_SET, detail=detail, is_named=False))
