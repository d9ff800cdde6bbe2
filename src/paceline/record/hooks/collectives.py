"""Record collectives with a ``ProcessGroup`` that delegates every call to the real one.

DDP's reducer, FSDP2, DTensor and the functions of ``torch.distributed`` all call the process group.
gloo has no completion hook, and DDP's communication hook stays free for the user.

Each collective has two events: COLLECTIVE from the call to its known completion, and BLOCKED for
the time in which this rank waited for it. In a backward, DDP takes the futures of its buckets and
waits for them in C++ after the last gradient is computed. A callback that is queued before DDP's
own waits for them first, so that communication which overlaps the backward does not count as
blocked time.

Sends and receives are numbered by tag and peer: the n-th send of a tag to a rank is the n-th
receive of that tag from the sender.
"""

import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _register_process_group, _unregister_process_group
from torch.autograd import Variable

from ..pending_value import is_capturing
from ..ring.recorder import Recorder, measure_difference_ns, now
from ..ring.states import NO_PEER, POINT_TO_POINT_OPS, ROOTED_OPS, Op
from .collective_check import (
    AUTOGRAD_ENGINE_CODE,
    NONBLOCKING_WAIT_S,
    CollectiveCheck,
    PendingCheck,
    is_checked,
    option_of,
)
from .collective_in_flight import (
    BLOCKED,
    COLLECTIVE,
    COLLECTIVES_HOOK,
    KEEPS_PYTHON_WORK,
    CollectiveInFlight,
    RecordedWork,
    is_in_background,
)
from .gradient_noise import HOOK as NOISE_HOOK
from .gradient_noise import GradientNoise
from .hook_failures import failed_hooks, report_failure


def sum_bytes(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in a nested list."""
    if isinstance(tensors, torch.Tensor):
        if tensors.is_sparse:
            return int(tensors._indices().nbytes + tensors._values().nbytes)
        return int(tensors.nbytes)
    if len(tensors) == 1:
        return sum_bytes(tensors[0])
    return sum(sum_bytes(tensor) for tensor in tensors)


def share_backends(group: dist.ProcessGroup, inner: dist.ProcessGroup) -> None:
    """Register the backends of ``inner`` in ``group``, so that each device has its real backend."""
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
        checks: CollectiveCheck | None = None,
    ) -> None:
        # The stub has only the constructor with a store.
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self._recorder = recorder
        self._group = recorder.new_group(name, inner.size(), inner.rank())
        self._checks = checks
        self._seq = 0  # number of collectives, the same on all members
        self._message_counts: dict[tuple[int, int, int], int] = {}  # by (op, peer, tag)
        # Launched in each running backward (re-entrant activation checkpointing nests backwards).
        self._pending: dict[
            int, list[tuple[dist.Work, CollectiveInFlight, PendingCheck | None]]
        ] = {}
        # Collectives whose end is not recorded yet, with their Works, which keep tensors alive.
        self._unfinished: list[tuple[CollectiveInFlight, Callable[[], RecordedWork | None]]] = []
        recorder.groups.add(self)
        if recorder.gradient_noise is None:
            recorder.gradient_noise = GradientNoise(recorder)
        share_backends(self, inner)

    def message_number(self, op: Op, peer: int, tag: int) -> int:
        """Return the number of the next message with this peer and tag (its upper bits)."""
        if peer < 0:  # the sender is known after the arrival
            return (tag & 0xFFF) << 20
        key = (op, peer, tag)
        self._message_counts[key] = count = self._message_counts.get(key, 0) + 1
        return (tag & 0xFFF) << 20 | count & 0xFFFFF

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """Run gloo's barrier that names missing ranks. It blocks and returns no Work."""
        launched, in_background = now(), is_in_background(self._recorder)
        state = BLOCKED[in_background]
        self._recorder.begin(state, launched, self._seq + 1, self._group, int(Op.BARRIER))
        if self._recorder.on_collective is not None:
            self._note_call(self._seq + 1, int(Op.BARRIER), (), 0, False)
        inner: Any = self.inner  # its stub lacks monitored_barrier
        inner.monitored_barrier(*args, **options)
        self._seq += 1
        if self._group:
            place = (0, self._seq, self._group, int(Op.BARRIER), -1)
            times = (launched, launched, launched)
            in_flight = CollectiveInFlight(self._recorder, *times, *place, in_background)
            in_flight.end_wait(launched, now(), in_background)

    def _note_call(
        self, seq: int, op: int, args: tuple[Any, ...], amount: int, in_backward: bool
    ) -> None:
        """Pass a call to the line profile, whose failure ends only its notes of collectives."""
        recorder = self._recorder
        try:
            assert recorder.on_collective is not None
            tensors, group = args[0] if args else None, (self._group, self.size())
            start = now()
            recorder.on_collective(group, seq, op, tensors, amount, in_backward)
            recorder.extra_cost_ns += now() - start
        except Exception as error:
            recorder.on_collective = None
            report_failure("the lines of collectives", error)

    def finish_after_backward(
        self, work: dist.Work, in_flight: CollectiveInFlight, check: PendingCheck | None = None
    ) -> None:
        """Record the wait of C++ code for this collective, which is at the end of the backward."""
        backward = torch._C._current_graph_task_id()
        if backward not in self._pending:
            self._pending[backward] = []
            finish = functools.partial(self._finish_pending, backward)
            Variable._execution_engine.queue_callback(finish)
        self._pending[backward].append((work, in_flight, check))

    def _begin_check(
        self, checks: CollectiveCheck, launched: int, name: str, op: Op, args: tuple[Any, ...]
    ) -> PendingCheck | None:
        """Begin to check that all ranks launch the same collective.

        Returns None if the check has ended, otherwise the check, which must be finished later. The
        wait for late ranks counts as the collective's; the rest counts as cost of recording.
        """
        if self._group:
            state = BLOCKED[is_in_background(self._recorder)]
            self._recorder.begin(state, launched, self._seq, self._group, int(op))
        check = checks.begin(self, self._seq, name, op, args)
        self._recorder.extra_cost_ns += checks.cost_ns
        return None if check.done else check

    def settle(self, seconds: float) -> None:
        """Wait for unfinished collectives and drop their tensors, before the group is destroyed."""
        deadline = now() + int(seconds * 1e9)
        while now() < deadline and self._unfinished:
            time.sleep(0.005)
            self.forget_finished()
        self._unfinished.clear()
        if hasattr(self.inner, "settle"):
            self.inner.settle(seconds)

    def forget_finished(self) -> None:
        """Drop the collectives whose end is recorded, or can be recorded now."""
        for entry in self._unfinished.copy():
            in_flight, reference = entry
            work = reference()
            if work is None:  # the script has dropped it without a wait
                in_flight.finish(now())
            elif not work.done():
                continue
            # In place: another thread may append at the same time, or remove the same entry.
            with contextlib.suppress(ValueError):
                self._unfinished.remove(entry)

    def drop_pending(self) -> None:
        """Drop the collectives of a backward that raised an exception."""
        for pending in self._pending.values():
            for _, in_flight, _ in pending:
                in_flight.finish(now())
        self._pending.clear()

    def _finish_pending(self, backward: int) -> None:
        """Wait for the buckets one by one, after the last gradient and before DDP's own wait."""
        for work, in_flight, check in self._pending.pop(backward, ()):
            if not in_flight.is_done:
                start = now()
                in_flight.begin_wait(start, in_background=False)
                if check is not None:
                    check.finish()
                work.wait()
                in_flight.end_wait(start, now(), in_background=False)

    def _count_launch(self, in_flight: CollectiveInFlight) -> None:
        recorder = self._recorder
        recorder.wrapped_calls += 1
        if recorder.launched_collectives is not None:
            names = ("amount", "seq", "group", "op", "peer")
            recorder.launched_collectives.append({n: getattr(in_flight, n) for n in names})

    def note_ended(self, in_flight: CollectiveInFlight, check: PendingCheck | None) -> None:
        """Note a collective that had ended for the host when its call returned, without a Work."""
        self._count_launch(in_flight)
        end = in_flight.returned
        in_flight.end_wait(end, end, in_flight.in_background)
        _finish_unrecorded(check)

    def note_exchange(
        self, op: Op, amount: int, launched: int, end: int, peer: int = NO_PEER
    ) -> CollectiveInFlight | None:
        """Record a collective that a thread beside the training ran below this group for it.

        Waits of the training thread for it are recorded by ``CollectiveInFlight.end_wait``.

        Args:
            launched: When this rank was ready for it (ns).

        Returns:
            The ended collective; None if it is not recorded.
        """
        self._seq += 1
        if not self._group or COLLECTIVES_HOOK in failed_hooks:
            return None
        try:
            place = (amount, self._seq, self._group, int(op), peer)
            in_flight = CollectiveInFlight(self._recorder, launched, launched, 0, *place)
            self._count_launch(in_flight)
            in_flight.finish(end)
            return in_flight
        except Exception as error:
            report_failure(COLLECTIVES_HOOK, error)
        return None

    def trains_here(self) -> bool:
        """Return whether the calling thread is the one that trains."""
        return not is_in_background(self._recorder)

    def begin_next_wait(self, op: Op, start: int) -> bool:
        """Note that the calling thread begins to wait for the next collective.

        Return whether it trains: then its wait is recorded.
        """
        trains = self.trains_here()
        if trains and self._group:
            self._recorder.begin(BLOCKED[False], start, self._seq + 1, self._group, int(op))
        return trains

    def note_launch(
        self,
        work: dist.Work,
        in_flight: CollectiveInFlight,
        check: PendingCheck | None,
        by_engine: bool,
    ) -> dist.Work:
        """Note that a collective was launched; return its Work, which records the wait for it.

        by_engine: C++ code of the backward waits for it.
        """
        self._count_launch(in_flight)
        if by_engine:
            self.finish_after_backward(work, in_flight, check)
            return work
        wrapped = RecordedWork(work, in_flight, self, check)
        if self._unfinished:
            self.forget_finished()
        reference = weakref.ref(wrapped) if KEEPS_PYTHON_WORK else lambda: wrapped
        self._unfinished.append((in_flight, reference))
        return wrapped


# By name of the process group's method: the collective, and the argument that is the whole vector.
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


def bytes_of_call(op: Op, vector_argument: int | None, args: tuple[Any, ...], size: int) -> int:
    """Return the bytes of the whole vector of a call in a group of this size."""
    amount = 0 if vector_argument is None else sum_bytes(args[vector_argument])
    return amount * size if op in (Op.GATHER, Op.SCATTER) else amount


def peer_of(op: Op, args: tuple[Any, ...]) -> int:
    """Return the root, or the other rank of a send or receive; -1 for symmetric collectives."""
    if op in POINT_TO_POINT_OPS:
        return int(args[1]) if len(args) > 2 else -1
    return int(option_of(args, "rootRank", -1))


def _recorded(name: str, op: Op, vector_argument: int | None) -> Callable[..., Any]:
    """Return a method that calls the method ``name`` of ``inner`` and records it.

    The Work of a collective that C++ launches in a backward (DDP's buckets) is returned unwrapped:
    Python is entered once for each of them, and once for all at the end of the backward.
    """
    number, message = int(op), op in POINT_TO_POINT_OPS
    has_peer = message or op in ROOTED_OPS
    reduces = op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
    in_backward = torch._C._current_graph_task_id

    def method(self: RecordedGroup, *args: Any, **options: Any) -> Any:
        call, recorder, launched = getattr(self.inner, name), self._recorder, now()
        check, checked = None, False
        if not message:
            self._seq += 1
            if checked := self._checks is not None and is_checked(self._seq):
                check = self._begin_check(self._checks, launched, name, op, args)
        engine = in_backward() != -1 and _called_by_engine()
        on_end = None
        if reduces and in_backward() != -1:
            on_end = _note_gradients(self, recorder, op, args, engine)
        is_recorded = bool(self._group) and COLLECTIVES_HOOK not in failed_hooks
        # a Work that is captured into a CUDA graph must not be asked whether it has ended
        is_recorded = is_recorded and not is_capturing()
        try:
            if is_recorded:
                called = now() if checked else launched
                amount = bytes_of_call(op, vector_argument, args, self.size())
                in_background = is_in_background(recorder)
                block = NO_PEER if in_background else recorder.block_peer
                peer = peer_of(op, args) if has_peer else block
                seq = self.message_number(op, peer, int(args[-1])) if message else self._seq
                place = (amount, seq, self._group, number, peer)
                if checked:
                    recorder.event(BLOCKED[in_background], launched, called, *place)
                recorder.begin(COLLECTIVE[in_background], called, seq, self._group, number)
                if recorder.on_collective is not None:
                    self._note_call(seq, number, args, amount, in_backward() != -1)
        except Exception as error:
            report_failure(COLLECTIVES_HOOK, error)
            is_recorded = False
        if not is_recorded:
            _finish_unrecorded(check)
            return call(*args, **options)
        work = call(*args, **options)
        returned = now()
        try:
            times = (launched, called, returned)
            in_flight = CollectiveInFlight(recorder, *times, *place, in_background)
            in_flight.on_end = on_end
            if work is None:
                if _is_blocking(args):  # NCCL, which makes the current stream wait
                    self.note_ended(in_flight, check)
                return None  # else part of a coalesced batch, whose wait is recorded as a whole
            return self.note_launch(work, in_flight, check, engine)
        except Exception as error:
            report_failure(COLLECTIVES_HOOK, error)
        _finish_unrecorded(check)
        return work

    method.__name__ = name
    return method


def _note_gradients(
    group: RecordedGroup, recorder: Recorder, op: Op, args: tuple[Any, ...], by_engine: bool
) -> Callable[[], None] | None:
    """Pass gradients that a backward reduces to those who need them before they are reduced.

    Returns what to call when they are. A failure of the notes of norms ends only these.
    """
    if recorder.on_backward_reduce is not None:
        # FSDP reduces and scatters one flat tensor of whole gradients, from Python
        is_flat = op == Op.REDUCE_SCATTER and len(args) > 1 and isinstance(args[1], torch.Tensor)
        scattered = [args[1]] if is_flat else []
        recorder.on_backward_reduce(group, args[0] if by_engine and not scattered else scattered)
    noise: GradientNoise = recorder.gradient_noise
    if not noise.is_sampling or is_capturing():
        return None
    try:
        return noise.launched(group, op, args, by_engine)
    except Exception as error:
        noise.is_sampling = False
        report_failure(NOISE_HOOK, error)
        return None


def _is_blocking(args: tuple[Any, ...]) -> bool:
    """Return whether a collective has ended for the host when its call returns."""
    return not option_of(args, "asyncOp", True)


def _finish_unrecorded(check: PendingCheck | None) -> None:
    """Finish the check of a collective whose Work is returned unwrapped and so does not finish it.

    A late rank may depend on what this rank does next, so the wait is limited.
    """
    if check is not None:
        check.wait(NONBLOCKING_WAIT_S)


def _called_by_engine() -> bool:
    """Return whether autograd's engine (DDP's reducer) called the method that calls this.

    Python code that launches a collective in a backward also waits for it.
    """
    try:
        return sys._getframe(2).f_code is AUTOGRAD_ENGINE_CODE
    except ValueError:  # a thread of the engine, without Python frames
        return True


for _name, (_op, _whole) in METHODS.items():
    if hasattr(dist.ProcessGroup, _name):  # names differ between PyTorch's versions
        setattr(RecordedGroup, _name, _recorded(_name, _op, _whole))


def measure_wrapper_cost(recorder: Recorder) -> None:
    """Measure the cost of the wrapper, including the entry into Python from C++.

    The reference is PyTorch's ``FakeProcessGroup``. Called before a rank's first collective.
    """
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
        call_plain, recorded = (functools.partial(call, name) for name in groups)
        recorder.wrapper_cost_ns = measure_difference_ns(call_plain, recorded)
    finally:
        for name in groups:
            _unregister_process_group(name)
