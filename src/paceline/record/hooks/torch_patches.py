"""The recorder's subscriptions to the taps, for a script that does not use Paceline's API.

They are installed once, before the script runs. Each replacement calls the original at once if
there is nothing to record; in a nested module that costs one comparison. They do not change any
results.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..ring.recorder import Recorder, measure_difference_ns, now
from ..ring.states import State
from . import group_shutdown, keras_training, taps
from .collective_check import announce_check, make_check
from .collectives import RecordedGroup, measure_wrapper_cost
from .hook_failures import noting, report_failure
from .horovod import operations as horovod_operations
from .sharded.block_labels import label_param_groups
from .taps import Function, Tap, on_import
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
    on_import(horovod_operations.MODULE, partial(horovod_operations.patch_operations, recorder))
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
