"""The one seam for collectives: a ``ProcessGroup`` that passes everything on and records it.

DDP's reducer, FSDP2, DTensor and ``torch.distributed``'s functions all call the process group;
gloo has no completion hook of its own, and DDP's communication hook stays free for the user.

Two events a collective: COLLECTIVE from the call to its known completion, and BLOCKED for the
time in which this rank stood still for it. In a backward, DDP waits for its buckets after the
last gradient is there. A callback queued before DDP's own waits for them first, so that what
was covered by the backward's computation is not taken for blocked time.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from .recorder import Recorder, now
from .states import ROOTED, Op, State


class _Flight:
    """One collective of this rank: what its events have in common."""

    __slots__ = ("fields", "landed", "launched", "recorder")

    def __init__(self, recorder: Recorder, launched: int, fields: dict[str, int]) -> None:
        self.recorder = recorder
        self.launched = launched
        self.fields = fields
        self.landed = False

    def blocked(self, start: int, end: int) -> None:
        """The rank stood still from ``start`` to ``end``, and then the result was there."""
        self.recorder.event(State.BLOCKED, start, end, **self.fields)
        self.land(end)

    def land(self, end: int) -> None:
        if not self.landed:
            self.landed = True
            self.recorder.event(State.COLLECTIVE, self.launched, end, **self.fields)


class RecordedWork(dist.Work):
    """A ``Work`` that records how long ``wait`` blocked, and passes all else on."""

    def __init__(self, work: dist.Work, flight: _Flight) -> None:
        super().__init__()
        self._work = work
        self._flight = flight

    def wait(self, *timeout: Any) -> bool:
        if self._flight.landed:
            return bool(self._work.wait(*timeout))
        start = now()
        done = self._work.wait(*timeout)
        self._flight.blocked(start, now())
        return bool(done)

    def done(self) -> bool:
        return self._flight.landed or bool(self._work.is_completed())

    def get_future(self) -> torch.futures.Future[Any]:
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
        return int(tensors.nbytes)
    if len(tensors) == 1:
        return _bytes(tensors[0])
    return sum(_bytes(tensor) for tensor in tensors)


class RecordedGroup(dist.ProcessGroup):
    """A process group over ``inner`` that records every collective.

    ``inner`` is a plain ``ProcessGroup`` with its backends; they are registered here as well,
    so that whoever asks for a backend by device gets the real one.
    """

    def __init__(self, inner: dist.ProcessGroup, name: str, recorder: Recorder) -> None:
        # The stub knows only the constructor with a store.
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self._recorder = recorder
        self._group = recorder.new_group(name, inner.size(), inner.rank())
        self._seq = 0
        self._pending: list[tuple[Any, _Flight]] = []
        # PyTorch before 2.9 keeps only the C++ half of a Work made in Python: hold the other.
        self._unwaited: list[RecordedWork] = []
        for device in inner._device_types:
            backend = inner._get_backend(device)
            kind = getattr(dist.ProcessGroup.BackendType, backend.name().upper())
            self._set_default_backend(kind)
            self._register_backend(device, kind, backend)

    def _record(
        self,
        name: str,
        op: Op,
        whole: int | None,
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Call ``inner``'s method and wrap the Work that it returns; measures its own cost."""
        if not self._group:
            return getattr(self.inner, name)(*args, **options)
        entered = now()
        amount = 0 if whole is None else _bytes(args[whole])
        if op in (Op.GATHER, Op.SCATTER):
            amount *= self.size()
        call = getattr(self.inner, name)
        if op not in (Op.SEND, Op.RECV):  # both sides of a collective count alike
            self._seq += 1
        fields = {
            "amount": amount,
            "seq": self._seq,
            "group": self._group,
            "op": int(op),
            "peer": _peer(op, args),
        }
        launched = now()
        work = call(*args, **options)
        returned = now()
        if work is None:  # part of a coalesced batch, which is waited for as a whole
            return None
        flight = _Flight(self._recorder, launched, fields)
        if torch._C._current_graph_task_id() != -1:
            if not self._pending:
                Variable._execution_engine.queue_callback(self._land_pending)
            self._pending.append((work, flight))
        wrapped = RecordedWork(work, flight)
        self._unwaited = [w for w in self._unwaited if not w.done()]
        self._unwaited.append(wrapped)
        self._recorder.extra_cost_ns += now() - returned + launched - entered
        return wrapped

    def settle(self, seconds: float) -> None:
        """Before the group is destroyed: let what is in flight end, and drop its tensors."""
        deadline = now() + int(seconds * 1e9)
        while now() < deadline and not all(work.done() for work in self._unwaited):
            time.sleep(0.005)
        self._unwaited.clear()

    def _land_pending(self) -> None:
        """After the last gradient, before DDP's own wait: wait for the buckets, one by one."""
        pending, self._pending = self._pending, []
        waited, entered = 0, now()
        for work, flight in pending:
            if flight.landed:
                continue
            start = now()
            work.wait()
            end = now()
            waited += end - start
            flight.blocked(start, end)
        self._recorder.extra_cost_ns += now() - entered - waited


# What torch calls, which collective that is, and which argument is the whole vector.
_METHODS = {
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
    if op in (Op.SEND, Op.RECV):
        return int(args[1]) if len(args) > 2 else -1
    if op in ROOTED:
        return next((int(arg.rootRank) for arg in args if hasattr(arg, "rootRank")), -1)
    return -1


def _recorded(name: str, op: Op, whole: int | None) -> Callable[..., Any]:
    def method(self: RecordedGroup, *args: Any, **options: Any) -> Any:
        return self._record(name, op, whole, args, options)

    method.__name__ = name
    return method


for _name, (_op, _whole) in _METHODS.items():
    if hasattr(dist.ProcessGroup, _name):  # names differ between PyTorch's versions
        setattr(RecordedGroup, _name, _recorded(_name, _op, _whole))
