"""Record the operations of an installed Horovod in the functions of ``horovod.torch.mpi_ops``.

Horovod exchanges tensors in a thread of its library, which does not call Python. So an operation
is recorded from its submission to the end of the wait for it, or to the first ``poll`` that finds
it complete. All of Horovod's Python code submits and waits through the patched functions, which are
replaced before other modules of Horovod import them.

Ranks may submit operations in different orders. So they are numbered by name: each name has a slot,
in the order in which the names first appear, and a count of its operations. Ranks that submit new
names in different orders are matched wrongly.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from ...ring.recorder import Recorder, measure_difference_ns, now
from ...ring.states import NO_PEER, Op
from ..collective_in_flight import COLLECTIVES_HOOK, CollectiveInFlight, is_in_background
from ..collectives import sum_bytes
from ..hook_failures import failed_hooks, noting, report_failure
from ..taps import Function, around, replace

MODULE = "horovod.torch.mpi_ops"
MAX_NAMES = 4096  # names with a slot; operations of further names count as unnamed ones
NUMBER_BITS = 32  # of a number in an event
# Functions that submit tensors and return a handle, and whether the result is larger than the
# input, and known only at the end.
SUBMITTING = {
    "_allreduce_async": (Op.ALL_REDUCE, False),
    "_grouped_allreduce_async": (Op.ALL_REDUCE, False),
    "_allgather_async": (Op.ALL_GATHER, True),
    "_grouped_allgather_async": (Op.ALL_GATHER, True),
    "_broadcast_async": (Op.BROADCAST, False),
    "_alltoall_async": (Op.ALL_TO_ALL, False),
    "_reducescatter_async": (Op.REDUCE_SCATTER, False),
    "_grouped_reducescatter_async": (Op.REDUCE_SCATTER, False),
}
BLOCKING = ("barrier", "join")  # recorded as barriers


def patch_operations(recorder: Recorder, mpi_ops: Any) -> None:
    """Record the operations of Horovod's module. Paceline's own implementation is not changed."""
    if mpi_ops.__name__ != MODULE or not hasattr(mpi_ops, "synchronize"):
        return
    operations = HorovodOperations(recorder)
    for name, (op, is_gathered) in SUBMITTING.items():
        if hasattr(mpi_ops, name):  # versions before 0.28 have fewer
            replace(mpi_ops, name, partial(operations.submitting, name, op, is_gathered))
    for name in BLOCKING:
        if hasattr(mpi_ops, name):
            around(mpi_ops, name, partial(operations.block, name))
    around(mpi_ops, "synchronize", operations.synchronize)
    around(mpi_ops, "poll", operations.poll)
    around(mpi_ops, "init", partial(operations.initialize, mpi_ops))


class _ProcessSet:
    """A process set in the record.

    Attributes:
        group: Number of its group in the record's header; 0 if the header is full.
        ranks: Its global ranks; None for all.
    """

    def __init__(self, group: int, ranks: list[int] | None) -> None:
        self.group, self.ranks = group, ranks
        self._slots: dict[str, int] = {}
        self._counts: dict[int, int] = {}

    def next_number(self, name: str, unnamed: str) -> int:
        """Return the number of the next operation of this name."""
        if name not in self._slots and len(self._slots) >= MAX_NAMES - len(SUBMITTING):
            name = unnamed
        slot = self._slots.setdefault(name, len(self._slots))
        count = self._counts[slot] = self._counts.get(slot, -1) + 1
        return (1 + count * MAX_NAMES + slot) % (1 << NUMBER_BITS)

    def index(self, rank: int) -> int:
        return self.ranks.index(rank) if self.ranks and rank in self.ranks else rank


class HorovodOperations:
    """The operations that this rank has submitted to Horovod."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._rank, self._size = 0, 1
        self._sets: dict[int, _ProcessSet] = {}
        # By handle: the operation, and the tensors whose size is known at its end.
        self._in_flight: dict[Any, tuple[CollectiveInFlight, Any]] = {}

    def initialize(self, mpi_ops: Any, init: Function, *args: Any, **kwargs: Any) -> Any:
        """Initialize Horovod, and join the recorder to its ranks."""
        result = init(*args, **kwargs)
        self._note_ranks(mpi_ops)
        return result

    @noting(COLLECTIVES_HOOK)
    def _note_ranks(self, mpi_ops: Any) -> None:
        place = int(mpi_ops.rank()), int(mpi_ops.size())
        if place != (self._rank, self._size):  # an elastic job may change both
            self._sets.clear()
        self._rank, self._size = place
        self._recorder.join(*place)
        self._recorder.update_header(horovod="installed")
        self._measure_cost()

    def submitting(self, kind: str, op: Op, is_gathered: bool, function: Function) -> Function:
        """Return a function that submits tensors, and notes the operation of the handle."""
        places = {name: at for at, name in enumerate(inspect.signature(function).parameters)}

        def argument(args: Any, kwargs: Any, name: str) -> Any:
            at = places.get(name, len(args))
            return args[at] if at < len(args) else kwargs.get(name)

        def submit(*args: Any, **kwargs: Any) -> Any:
            called = now()
            handle = function(*args, **kwargs)
            if COLLECTIVES_HOOK in failed_hooks:
                return handle
            try:
                process_set = self._set_of(argument(args, kwargs, "process_set"))
                name, peer = argument(args, kwargs, "name"), NO_PEER
                if op == Op.BROADCAST:
                    peer = process_set.index(int(argument(args, kwargs, "root_rank")))
                in_flight = self._begin(process_set, name, kind, op, called, peer)
                in_flight.amount = 0 if is_gathered else sum_bytes(args[0])
                self._in_flight[handle] = in_flight, args[1] if is_gathered else None
            except Exception as error:
                report_failure(COLLECTIVES_HOOK, error)
            return handle

        return submit

    def synchronize(self, wait: Callable[[Any], Any], handle: Any) -> Any:
        """Wait for an operation, and record the wait."""
        in_flight, outputs = self._in_flight.pop(handle, (None, None))
        if in_flight is None:
            return wait(handle)
        start = self._begin_wait(in_flight)
        try:
            return wait(handle)
        finally:
            self._end_wait(in_flight, start, outputs)

    def poll(self, is_done: Callable[[Any], Any], handle: Any) -> Any:
        """Return whether an operation is complete, and note that it is."""
        is_complete = is_done(handle)
        if is_complete and handle in self._in_flight:
            in_flight, outputs = self._in_flight[handle]
            if not in_flight.is_done:
                self._set_amount(in_flight, outputs)
                in_flight.finish(now())
        return is_complete

    def block(self, kind: str, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Call a function that submits no tensors and waits for all ranks."""
        start = now()
        in_flight: CollectiveInFlight | None = None
        try:
            given = args[0] if args else kwargs.get("process_set")
            process_set = self._set_of(given if kind == "barrier" else None)
            in_flight = self._begin(process_set, None, kind, Op.BARRIER, start, NO_PEER)
            start = self._begin_wait(in_flight)
        except Exception as error:
            report_failure(COLLECTIVES_HOOK, error)
        try:
            return function(*args, **kwargs)
        finally:
            if in_flight is not None:
                self._end_wait(in_flight, start, None)

    # Implementation.

    def _set_of(self, process_set: Any) -> _ProcessSet:
        """Return the process set's part of the record; None stands for all ranks."""
        number = 0 if process_set is None else int(process_set.process_set_id or 0)
        found = self._sets.get(number)
        if found is None:
            rank, size, ranks = self._rank, self._size, None
            if number:
                rank, size = int(process_set.rank()), int(process_set.size())
                ranks = list(process_set.ranks or ()) or None
            name = f"horovod:{number}" if number else "horovod"
            found = _ProcessSet(self._recorder.new_group(name, size, rank), ranks)
            self._sets[number] = found
        return found

    def _begin(
        self,
        process_set: _ProcessSet,
        name: str | None,
        kind: str,
        op: Op,
        called: int,
        peer: int,
    ) -> CollectiveInFlight:
        """Return a submitted operation. called: start of the call that has submitted it."""
        recorder, unnamed = self._recorder, f"{kind}.noname"
        recorder.wrapped_calls += 1
        number = process_set.next_number(f"{kind}.{name}" if name else unnamed, unnamed)
        place = (0, number, process_set.group, int(op), peer)
        return CollectiveInFlight(
            recorder, called, called, now(), *place, is_in_background(recorder)
        )

    def _begin_wait(self, in_flight: CollectiveInFlight) -> int:
        start = now()
        in_flight.begin_wait(start, is_in_background(self._recorder))
        return start

    @noting(COLLECTIVES_HOOK)
    def _end_wait(self, in_flight: CollectiveInFlight, start: int, outputs: Any) -> None:
        self._set_amount(in_flight, outputs)
        in_flight.end_wait(start, now(), is_in_background(self._recorder))

    def _set_amount(self, in_flight: CollectiveInFlight, outputs: Any) -> None:
        if outputs is not None:
            in_flight.amount = sum_bytes(outputs)

    def _measure_cost(self) -> None:
        """Measure the cost of recording one operation, without its events."""
        if self._recorder.wrapper_cost_ns or not self._recorder.enabled:
            return
        scratch = HorovodOperations(Recorder(0, 1, wait=True))  # writes nothing

        def plain(tensor: Any, output: Any, name: Any, process_set: Any = None) -> int:
            return 0

        def plain_wait(handle: int) -> int:
            return handle

        submit = scratch.submitting("measured", Op.ALL_REDUCE, False, plain)
        wait = partial(scratch.synchronize, plain_wait)
        self._recorder.wrapper_cost_ns = measure_difference_ns(
            lambda: plain_wait(plain([], [], "name")), lambda: wait(submit([], [], "name"))
        )
