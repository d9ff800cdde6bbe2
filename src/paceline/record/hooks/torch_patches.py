"""The recorder's subscriptions to the taps and to Horovod, for scripts without Paceline's API.

They are installed once, before the script runs. Each replacement calls the original at once if
there is nothing to record; in a nested module that costs one comparison. They do not change any
results.
"""

import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..ring.recorder import Recorder, measure_difference_ns, now
from ..ring.states import NO_PEER, Op, State
from . import group_shutdown, keras_training, taps
from .block_labels import label_param_groups
from .collective_check import announce_check, make_check
from .collective_in_flight import COLLECTIVES_HOOK, CollectiveInFlight, is_in_background
from .collectives import RecordedGroup, measure_wrapper_cost, sum_bytes
from .hook_failures import failed_hooks, noting, report_failure
from .taps import Function, Tap, around, on_import, replace
from .training_loop import LoopRecorder

_C10D = "torch.distributed.distributed_c10d"


def install(loop: LoopRecorder) -> None:
    """Patch torch in this process, now or when the script imports it."""
    recorder = loop.recorder
    taps.wrap_forwards(partial(_forwards, loop))
    taps.BACKWARD.wrap(partial(recorded_unless_busy, loop, loop.backward))
    taps.on_step(loop.before_step, loop.after_step)
    for tap in (
        *(taps.ZERO_GRADIENTS, *taps.CLIPPING),
        *(taps.SCALED_STEP, taps.UNSCALE, taps.UPDATE_SCALE),
    ):
        tap.wrap(partial(_of_optimizer, loop))
    taps.BATCH.wrap(partial(recorded_unless_busy, loop, loop.fetch))
    taps.EPOCH.wrap(partial(recorded_unless_busy, loop, loop.open))
    for tap in (
        *(taps.SAVE, taps.SAVE_TENSORS, taps.SAVE_MODEL_TENSORS),
        *(taps.SHARED_SAVE, taps.SHARED_OLD_SAVE),
    ):
        tap.wrap(partial(_timed, recorder, State.CHECKPOINT))
    taps.SHARED_ASYNC_SAVE.wrap(partial(_async_saves, recorder))
    Tap("torch.autograd.profiler", "profile._prepare_trace").before(partial(_give_way, recorder))
    taps.NEW_GROUP.wrap(partial(_recorded_groups, recorder))
    Tap(_C10D, "batch_isend_irecv").around(_coalesced)
    on_import(_C10D, group_shutdown.patch_destroy_process_group)
    label_param_groups(recorder)
    Tap("torch.distributed.rendezvous", "_torchelastic_use_agent_store").around(_uses_agent_store)
    on_import(HOROVOD, partial(patch_horovod, recorder))
    keras_training.install(loop)


def _timed(recorder: Recorder, state: State, function: Function) -> Function:
    """Return ``function`` with its calls in the training thread recorded as ``state``."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != recorder.training_thread:
            return function(*args, **kwargs)
        start = now()
        recorder.begin(state, start)
        try:
            return function(*args, **kwargs)
        finally:
            recorder.event(state, start, now())

    return timed


def _forwards(loop: LoopRecorder, original: Function) -> Function:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if loop.busy:  # the same as ``original``, without another frame
            if self._compiled_call_impl is not None:
                return self._compiled_call_impl(*args, **kwargs)
            return self._call_impl(*args, **kwargs)
        if loop.ignores_thread():
            return original(self, *args, **kwargs)
        return loop.forward(self, original, args, kwargs)

    return call


def recorded_unless_busy(
    loop: LoopRecorder, record: Callable[..., Any], function: Function
) -> Function:
    """Return a function whose calls ``record`` makes, unless they are part of a recorded one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if loop.busy or loop.ignores_thread():
            return function(*args, **kwargs)
        return record(function, *args, **kwargs)

    return call


def _of_optimizer(loop: LoopRecorder, function: Function) -> Function:
    """Return a function that belongs to the optimizer's step, with its calls recorded."""
    timed = _timed(loop.recorder, State.OPTIMIZER, function)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if loop.stopped else timed)(*args, **kwargs)

    return chosen


@noting("the profiler")
def _give_way(recorder: Recorder, *_: Any) -> None:
    """End our kernel sampling, which uses PyTorch's profiler, when the script starts a session."""
    if recorder.kernel_sampler is not None:
        recorder.kernel_sampler.give_way()


def _async_saves(recorder: Recorder, save: Function) -> Function:
    """Return an asynchronous ``save`` that is recorded, as are waits for its futures."""

    def with_timed_waits(*args: Any, **kwargs: Any) -> Any:
        response = save(*args, **kwargs)
        for name in ("", "staging_completion", "upload_completion"):  # PyTorch 2.9: two futures
            future = getattr(response, name, None) if name else response
            if isinstance(future, Future):
                timed = _timed(recorder, State.CHECKPOINT, future.result)
                future.result = timed  # type: ignore[method-assign]
        return response

    return _timed(recorder, State.CHECKPOINT, with_timed_waits)


def _uses_agent_store(original: Callable[[], bool]) -> bool:
    """Return whether to use the agent's store: only at the agent's port.

    A script that starts its ranks itself, on another port, has no agent there.
    """
    ours = os.environ.get("PACELINE_STORE_PORT", os.environ.get("MASTER_PORT"))
    return bool(original()) and os.environ.get("MASTER_PORT") == ours


def _recorded_groups(recorder: Recorder, original: Function) -> Function:
    """Return the helper of torch that makes a process group, which then is a ``RecordedGroup``.

    What torch knows of the group (its backend's name, its tags) does not change.
    """

    def helper(size: int, rank: int, members: list[int], *args: Any, **kwargs: Any) -> Any:
        import torch.distributed.distributed_c10d as c10d

        # The store is only passed on members. torch passes backend and store as positional
        # arguments, and the name as a keyword.
        shared = args[1] if len(args) > 1 and rank is not None else None
        key = announce_check(shared, str(kwargs.get("group_name", args[2:3])))
        group, store = original(size, rank, members, *args, **kwargs)
        if group is c10d.GroupMember.NON_GROUP_MEMBER:
            return group, store
        if not members:
            try:
                recorder.join(group.rank(), group.size())
                measure_wrapper_cost(recorder)
            except Exception as error:  # the group is wrapped nevertheless: others check with it
                report_failure("the process groups", error)
        if not isinstance(group, RecordedGroup):
            checks = make_check(group, shared, key)
            name = str(c10d._world.pg_names[group])
            recorded = RecordedGroup(group, name, recorder, checks)
            replace_group(c10d, group, recorded)
            return recorded, store
        return group, store

    return helper


def replace_group(c10d: Any, group: Any, other: Any) -> None:
    """Replace ``group`` by ``other`` in torch's tables of process groups."""
    world = c10d._world
    name = world.pg_names[group]
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        if group in table:
            table[other] = table.pop(group)
    for tagged in world.tags_to_pg.values():
        tagged[:] = [other if known is group else known for known in tagged]
    if group.bound_device_id is not None:
        other.bound_device_id = group.bound_device_id
    other._set_group_name(name)
    other._set_group_desc(group.group_desc)
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    _unregister_process_group(name)
    _register_process_group(name, other)


def _coalesced(original: Function, p2p_op_list: list[Any]) -> Any:
    """Coalesce batched sends and receives: torch does so only for a plain group's type."""
    from torch import distributed

    dist: Any = distributed
    group = (p2p_op_list and p2p_op_list[0].group) or dist.group.WORLD
    if not isinstance(group, RecordedGroup):
        return original(p2p_op_list)
    device = p2p_op_list[0].tensor.device
    if not getattr(group._get_backend(device), "supports_coalescing", False):
        return original(p2p_op_list)
    c10d = dist.distributed_c10d
    with c10d._coalescing_manager(group, device, async_ops=True) as coalesced:
        for operation in p2p_op_list:
            operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
    return coalesced.works


def measure_hooks(loop: LoopRecorder) -> None:
    """Measure the cost of a hook without its event, interleaved with calls that are not recorded.

    Called before the script runs. The caller discards the events that this records.
    """
    import torch

    module = torch.nn.ReLU()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    tensor = torch.zeros(1)

    def plain() -> None:
        loop.stopped = True
        module(tensor)
        loop.stopped = False

    def recorded() -> None:
        loop.stopped = False
        module(tensor)
        loop.stopped = False

    recorder = loop.recorder
    recorder.hook_cost_ns = max(
        0.0, measure_difference_ns(plain, recorded) - recorder.event_cost_ns
    )
    loop.reset()


# Operations of an installed Horovod, in the functions of ``horovod.torch.mpi_ops``.
#
# Horovod exchanges tensors in a thread of its library, which does not call Python. So an operation
# is recorded from its submission to the end of the wait for it, or to the first ``poll`` that finds
# it complete. All of Horovod's Python code submits and waits through the patched functions, which
# are replaced before other modules of Horovod import them.
#
# Ranks may submit operations in different orders. So they are numbered by name: each name has a
# slot, in the order in which the names first appear, and a count of its operations. Ranks that
# submit new names in different orders are matched wrongly.


HOROVOD = "horovod.torch.mpi_ops"
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


def patch_horovod(recorder: Recorder, mpi_ops: Any) -> None:
    """Record the operations of Horovod's module. Paceline's own implementation is not changed."""
    if mpi_ops.__name__ != HOROVOD or not hasattr(mpi_ops, "synchronize"):
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
        self, process_set: _ProcessSet, name: str | None, kind: str, op: Op, called: int, peer: int
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
