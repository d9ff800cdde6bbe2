"""The one seam for collectives: a ``ProcessGroup`` that passes everything on and records it.

DDP's reducer, FSDP2, DTensor and ``torch.distributed``'s functions all call the process group;
gloo has no completion hook of its own, and DDP's communication hook stays free for the user.

Two events a collective: COLLECTIVE from the call to its known completion, and BLOCKED for the
time in which this rank stood still for it. In a backward, DDP takes the futures of its buckets
and waits for them in C++ after the last gradient is there. A callback queued before DDP's own
waits for them first, so that what was covered by the backward's computation is not taken for
blocked time.

Sends and receives are numbered by tag and peer: the n-th send of a tag to a rank is the n-th
receive of that tag from the sender.
"""

import functools
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    HashStore,
    _register_process_group,
    _unregister_process_group,
)
from torch.autograd import Variable

from ..ring.recorder import Recorder, measure_difference_ns, now
from ..ring.states import POINT_TO_POINT_OPS, ROOTED_OPS, Op, State
from .collective_check import AUTOGRAD_ENGINE_CODE, CollectiveCheck, PendingCheck, is_checked

LONG_CALL_NS = 20_000  # a call that launches and takes longer is an event of its own
SYNCHRONOUS_WAIT_NS = 50_000  # between a call's return and the wait for it: one synchronous call
_COLLECTIVE, _BLOCKED = int(State.COLLECTIVE), int(State.BLOCKED)  # quicker than the enum's


class _Flight:
    """One collective of this rank: what its events have in common."""

    __slots__ = (
        *("amount", "called", "group", "landed", "launched", "op", "peer", "recorder"),
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
        self.called = called  # later where ranks had to agree first: that time is told
        self.returned = returned  # the call that launched it; 0: its time is told
        self.amount, self.seq, self.group, self.op, self.peer = amount, seq, group, op, peer
        self.landed = False

    def _tell(self, state: int, start: int, end: int) -> None:
        self.recorder.event(
            state, start, end, self.amount, self.seq, self.group, self.op, self.peer
        )

    def _launch_over(self) -> None:
        """The call itself was long, and nobody waited at once: it stood still for that too."""
        if self.returned - self.called > LONG_CALL_NS:
            self._tell(State.CALL, self.called, self.returned)
        self.returned = 0

    def stands(self, since: int) -> None:
        """The rank begins to stand still for it."""
        self.recorder.begin(_BLOCKED, since, self.seq, self.group, self.op)

    def blocked(self, start: int, end: int) -> None:
        """The rank stood still from ``start`` to ``end``, and then the result was there; where
        it waited right after its call, from the call on."""
        if start - self.returned < SYNCHRONOUS_WAIT_NS:
            start, self.returned = self.called, 0
        self._tell(State.BLOCKED, start, end)
        self.land(end)

    def land(self, end: int) -> None:
        if not self.landed:
            self.landed = True
            if self.returned:
                self._launch_over()
            self._tell(State.COLLECTIVE, self.launched, end)


class RecordedWork(dist.Work):
    """A ``Work`` that records how long ``wait`` blocked, and passes all else on."""

    def __init__(
        self,
        work: dist.Work,
        flight: _Flight,
        group: "RecordedGroup",
        check: PendingCheck | None = None,
    ) -> None:
        super().__init__()
        self._work = work
        self._flight = flight
        self._check = check  # whether ranks agree, where that is not known yet
        self._group = weakref.ref(group)

    def wait(self, *timeout: Any) -> bool:
        if self._flight.landed:
            if self._check is not None:
                self._check.finish()
            return bool(self._work.wait(*timeout))
        start = now()
        self._flight.stands(start)
        if self._check is not None:
            self._check.finish()
        done = self._work.wait(*timeout)
        end = now()
        if self._flight.op == Op.RECV and self._flight.peer < 0:
            self._from_anybody()
        self._flight.blocked(start, end)
        return bool(done)

    def _from_anybody(self) -> None:
        """The sender of a receive that took any is known when it is done."""
        group, flight = self._group(), self._flight
        if group is not None:
            flight.peer = self._work._source_rank()
            flight.seq = group.message_number(Op.RECV, flight.peer, flight.seq >> 20)

    def done(self) -> bool:
        """Whether it is complete; if so, its end is taken to be now where nobody waited."""
        if not self._flight.landed and self._work.is_completed():
            self._flight.land(now())
        return self._flight.landed

    def get_future(self) -> torch.futures.Future[Any]:
        group = self._group()
        if group is not None and torch._C._current_graph_task_id() != -1:
            group.land_after_backward(self._work, self._flight, self._check)
        return self._work.get_future()


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: RecordedWork, *args: Any) -> Any:
        return getattr(self._work, name)(*args)

    method.__name__ = name
    return method


for _name in (
    *("is_completed", "is_success", "exception", "result", "synchronize", "source_rank"),
    *("block_current_stream", "get_future_result", "boxed", "_get_op_type"),
):
    if hasattr(dist.Work, _name):
        setattr(RecordedWork, _name, _passed_on(_name))


def _bytes(tensors: Any) -> int:
    """Bytes of the whole vector: every tensor of a nested list."""
    if isinstance(tensors, torch.Tensor):
        if tensors.is_sparse:
            return int(tensors._indices().nbytes + tensors._values().nbytes)
        return int(tensors.nbytes)
    if len(tensors) == 1:
        return _bytes(tensors[0])
    return sum(_bytes(tensor) for tensor in tensors)


def share_backends(group: dist.ProcessGroup, inner: dist.ProcessGroup) -> None:
    """``inner``'s backends are the group's too: who asks for one by device gets the real one."""
    for device in inner._device_types:
        backend = inner._get_backend(device)
        kinds = dist.ProcessGroup.BackendType
        kind = getattr(kinds, backend.name().upper(), kinds.CUSTOM)
        group._set_default_backend(kind)
        group._register_backend(device, kind, backend)


class RecordedGroup(dist.ProcessGroup):
    """A process group over ``inner`` that records every collective.

    ``inner`` is a plain ``ProcessGroup`` with its backends, or one over shared memory.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        name: str,
        recorder: Recorder,
        agreement: CollectiveCheck | None = None,
    ) -> None:
        # The stub knows only the constructor with a store.
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self._recorder = recorder
        self._group = recorder.new_group(name, inner.size(), inner.rank())
        self._agreement = agreement
        self._seq = 0  # collectives so far: the same number on all members
        self._messages: dict[tuple[int, int, int], int] = {}  # op, peer, tag: how many so far
        # What is in flight in each backward that runs (re-entrant checkpoints nest them).
        self._pending: dict[int, list[tuple[dist.Work, _Flight, PendingCheck | None]]] = {}
        # PyTorch before 2.9 keeps only the C++ half of a Work made in Python: hold the other.
        self._unwaited: list[RecordedWork] = []
        share_backends(self, inner)

    def message_number(self, op: Op, peer: int, tag: int) -> int:
        """The number of the next message with this peer and tag, the tag in its upper bits."""
        if peer < 0:  # known when it has arrived
            return (tag & 0xFFF) << 20
        key = (op, peer, tag)
        self._messages[key] = count = self._messages.get(key, 0) + 1
        return (tag & 0xFFF) << 20 | count & 0xFFFFF

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """gloo's barrier that names missing ranks; it blocks and gives no Work."""
        launched = now()
        self._recorder.begin(_BLOCKED, launched, self._seq + 1, self._group, int(Op.BARRIER))
        inner: Any = self.inner  # whose stub lacks it
        inner.monitored_barrier(*args, **options)
        self._seq += 1
        if self._group:
            place = (0, self._seq, self._group, int(Op.BARRIER), -1)
            _Flight(self._recorder, launched, launched, launched, *place).blocked(launched, now())

    def land_after_backward(
        self, work: dist.Work, flight: _Flight, check: PendingCheck | None = None
    ) -> None:
        """Whoever launched this, or took its future, waits for it in C++ at the backward's end."""
        backward = torch._C._current_graph_task_id()
        if backward not in self._pending:
            self._pending[backward] = []
            land = functools.partial(self._land_pending, backward)
            Variable._execution_engine.queue_callback(land)
        self._pending[backward].append((work, flight, check))

    def _agreed(
        self, agreement: CollectiveCheck, launched: int, name: str, op: Op, args: tuple[Any, ...]
    ) -> PendingCheck | None:
        """Whether ranks agree on what they launch; None where that is known, else to be asked
        again. The wait for late ranks is this collective's; the rest is recording's cost."""
        if self._group:
            self._recorder.begin(_BLOCKED, launched, self._seq, self._group, int(op))
        check = agreement.begin(self, self._seq, name, op, args)
        self._recorder.extra_cost_ns += agreement.cost_ns
        return None if check.done else check

    def settle(self, seconds: float) -> None:
        """Before the group is destroyed: let what is in flight end, and drop its tensors."""
        deadline = now() + int(seconds * 1e9)
        while now() < deadline and not all(work.done() for work in self._unwaited):
            time.sleep(0.005)
        self._unwaited.clear()
        if hasattr(self.inner, "settle"):
            self.inner.settle(seconds)

    def _land_pending(self, backward: int) -> None:
        """After the last gradient, before DDP's own wait: wait for the buckets, one by one."""
        for work, flight, check in self._pending.pop(backward):
            if not flight.landed:
                start = now()
                flight.stands(start)
                if check is not None:
                    check.finish()
                work.wait()
                flight.blocked(start, now())


# What torch calls, which collective that is, and which argument is the whole vector.
METHODS = {
    "allreduce": (Op.ALL_REDUCE, 0),
    "allreduce_coalesced": (Op.ALL_REDUCE, 0),
    "broadcast": (Op.BROADCAST, 0),
    "allgather": (Op.ALL_GATHER, 0),
    "_allgather_base": (Op.ALL_GATHER, 0),
    "all_gather_single": (Op.ALL_GATHER, 0),
    "allgather_coalesced": (Op.ALL_GATHER, 0),
    "allgather_into_tensor_coalesced": (Op.ALL_GATHER, 0),
    "all_gather_single_coalesced": (Op.ALL_GATHER, 0),
    "reduce_scatter": (Op.REDUCE_SCATTER, 1),
    "_reduce_scatter_base": (Op.REDUCE_SCATTER, 1),
    "reduce_scatter_single": (Op.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced": (Op.REDUCE_SCATTER, 1),
    "reduce_scatter_single_coalesced": (Op.REDUCE_SCATTER, 1),
    "reduce": (Op.REDUCE, 0),
    "gather": (Op.GATHER, 1),
    "scatter": (Op.SCATTER, 0),
    "alltoall": (Op.ALL_TO_ALL, 1),
    "alltoall_base": (Op.ALL_TO_ALL, 1),
    "all_to_all_single": (Op.ALL_TO_ALL, 1),
    "barrier": (Op.BARRIER, None),
    "send": (Op.SEND, 0),
    "recv": (Op.RECV, 0),
    "recv_anysource": (Op.RECV, 0),
}


def _peer(op: Op, args: tuple[Any, ...]) -> int:
    """The root, or the other side of a send or recv; -1 where all members take part alike."""
    if op in POINT_TO_POINT_OPS:
        return int(args[1]) if len(args) > 2 else -1
    return next((int(arg.rootRank) for arg in args if hasattr(arg, "rootRank")), -1)


def _recorded(name: str, op: Op, whole: int | None) -> Callable[..., Any]:
    """``inner``'s method, recorded. What C++ launches in a backward (DDP's buckets) goes back as
    it is: Python is entered once for it, and once for all of them at the backward's end."""
    number, message, has_peer = (
        int(op),
        op in POINT_TO_POINT_OPS,
        op in (*POINT_TO_POINT_OPS, *ROOTED_OPS),
    )
    shared, reduces = op in (Op.GATHER, Op.SCATTER), op == Op.ALL_REDUCE
    in_backward = torch._C._current_graph_task_id

    def method(self: RecordedGroup, *args: Any, **options: Any) -> Any:
        call, recorder, launched = getattr(self.inner, name), self._recorder, now()
        check, checked = None, False
        if not message:
            self._seq += 1
            if checked := self._agreement is not None and is_checked(self._seq):
                check = self._agreed(self._agreement, launched, name, op, args)
        engine = in_backward() != -1 and _called_by_engine()
        if reduces and recorder.on_backward_reduce is not None and in_backward() != -1:
            recorder.on_backward_reduce(self, args[0] if engine else [])
        if not self._group:
            return call(*args, **options)
        called = now() if checked else launched
        amount = 0 if whole is None else _bytes(args[whole])
        if shared:
            amount *= self.size()
        peer = _peer(op, args) if has_peer else -1
        seq = self.message_number(op, peer, int(args[-1])) if message else self._seq
        if checked:
            recorder.event(_BLOCKED, launched, called, amount, seq, self._group, number, peer)
        recorder.begin(_COLLECTIVE, called, seq, self._group, number)
        work = call(*args, **options)
        returned = now()
        if work is None:  # part of a coalesced batch, which is waited for as a whole
            return None
        recorder.wrapped_calls += 1
        place = (amount, seq, self._group, number, peer)
        flight = _Flight(recorder, launched, called, returned, *place)
        if recorder.launched_collectives is not None:
            recorder.launched_collectives.append(
                {"amount": amount, "seq": seq, "group": self._group, "op": number, "peer": peer}
            )
        if engine:
            self.land_after_backward(work, flight, check)
            return work
        wrapped = RecordedWork(work, flight, self, check)
        self._unwaited = [w for w in self._unwaited if not w.done()]
        self._unwaited.append(wrapped)
        return wrapped

    method.__name__ = name
    return method


def _called_by_engine() -> bool:
    """Whether it was autograd's engine that called the method above this: DDP's reducer. Python
    code that launches in a backward waits by itself."""
    try:
        return sys._getframe(2).f_code is AUTOGRAD_ENGINE_CODE
    except ValueError:  # a thread of the engine's own, without any Python
        return True


for _name, (_op, _whole) in METHODS.items():
    if hasattr(dist.ProcessGroup, _name):  # names differ between PyTorch's versions
        setattr(RecordedGroup, _name, _recorded(_name, _op, _whole))


def measure_wrapper_cost(recorder: Recorder) -> None:
    """Measure what the wrapper costs (entering Python from C++ among it), against PyTorch's
    process group that does nothing. Before a rank's first collective."""
    fake = getattr(torch._C._distributed_c10d, "FakeProcessGroup", None)
    if fake is None or not hasattr(fake, "_create_internal"):
        return
    if recorder.wrapper_cost_ns or not recorder.enabled:
        return
    plain = dist.ProcessGroup(HashStore(), 0, 1)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    plain._set_default_backend(kind)
    plain._register_backend(torch.device("cpu"), kind, fake._create_internal(0, 1))
    scratch = Recorder(0, 1, wait=True)  # writes nothing
    groups: dict[Any, Any] = {
        "paceline-plain": plain,
        "paceline-recorded": RecordedGroup(plain, "none", scratch),
    }
    for name, group in groups.items():
        _register_process_group(name, group)
    tensor = torch.zeros(1)

    def call(name: str) -> None:  # through C++, as DDP does
        functional = torch.ops._c10d_functional
        functional.wait_tensor(functional.all_reduce(tensor, "sum", name))

    try:
        plainly, recorded = (functools.partial(call, name) for name in groups)
        recorder.wrapper_cost_ns = measure_difference_ns(plainly, recorded)
    finally:
        for name in groups:
            _unregister_process_group(name)
