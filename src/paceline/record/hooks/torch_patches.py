"""Where a script that knows nothing of this is listened to: torch's own seams.

Set once, before the script runs. Each replacement passes on at once where it has nothing to do:
in a nested module that is one comparison. Nothing of a script's results depends on them.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from ..ring.recorder import Recorder, measure_difference_ns, now
from ..ring.states import State
from . import group_shutdown
from .collective_check import announce_check, make_check
from .collectives import RecordedGroup, measure_wrapper_cost
from .import_hooks import after_import
from .training_loop import LoopRecorder


def install(loop: LoopRecorder) -> None:
    """Listen to this process's script, now or when it imports torch."""
    recorder = loop.recorder
    patches: dict[str, Callable[[Any], None]] = {
        "torch.nn.modules.module": functools.partial(_modules, loop),
        "torch.autograd": functools.partial(_backward, loop),
        "torch.optim.optimizer": functools.partial(_optimizers, loop),
        "torch.utils.data.dataloader": functools.partial(_loaders, loop),
        "torch.distributed.distributed_c10d": functools.partial(_groups, recorder),
        "torch.distributed.rendezvous": _own_store,
        "torch.nn.utils.clip_grad": functools.partial(_clipping, loop),
        "torch.amp.grad_scaler": functools.partial(_scaling, loop),
        "torch.serialization": functools.partial(_saving, recorder, ["save"]),
        "torch.distributed.checkpoint": functools.partial(
            _saving, recorder, ["save", "async_save", "save_state_dict"]
        ),
        "torch.autograd.profiler": functools.partial(_profiling, recorder),
        "safetensors.torch": functools.partial(_saving, recorder, ["save_file", "save_model"]),
    }
    after_import(patches)


def _timed(function: Callable[..., Any], state: State, recorder: Recorder) -> Callable[..., Any]:
    """``function``, its time in the main thread recorded as ``state``."""
    main = threading.main_thread().ident

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != main:
            return function(*args, **kwargs)
        start = now()
        recorder.begin(state, start)
        try:
            return function(*args, **kwargs)
        finally:
            recorder.event(state, start, now())

    return timed


def _modules(loop: LoopRecorder, module: Any) -> None:
    kind = module.Module
    original = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if loop.busy:  # what original does, without a frame of its own
            if self._compiled_call_impl is not None:
                return self._compiled_call_impl(*args, **kwargs)
            return self._call_impl(*args, **kwargs)
        if loop.elsewhere():
            return original(self, *args, **kwargs)
        return loop.forward(self, original, args, kwargs)

    functools.update_wrapper(call, original)
    kind.__call__ = call

    def known_to_dynamo(module: Any) -> None:
        # torch.compile goes straight to a module's forward only where the call is "unpatched".
        if hasattr(module, "unpatched_nn_module_call"):
            module.unpatched_nn_module_call = call

    after_import(
        {
            "torch._dynamo.utils": known_to_dynamo,
            "torch._dynamo.variables.nn_module": known_to_dynamo,
            # Nor does it look into this package's own frames.
            "torch._dynamo.trace_rules": lambda rules: rules.add("paceline"),
        }
    )


def _backward(loop: LoopRecorder, module: Any) -> None:
    original = module._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if loop.busy or loop.elsewhere():
            return original(*args, **kwargs)
        return loop.backward(original, args, kwargs)

    module._engine_run_backward = run_backward


def _optimizers(loop: LoopRecorder, module: Any) -> None:
    module.register_optimizer_step_pre_hook(loop.before_step)
    module.register_optimizer_step_post_hook(loop.after_step)
    kind = module.Optimizer
    kind.zero_grad = _unless_stopped(loop, kind.zero_grad)


def _unless_stopped(loop: LoopRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    timed = _timed(function, State.OPTIMIZER, loop.recorder)

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if loop.stopped else timed)(*args, **kwargs)

    return chosen


def _clipping(loop: LoopRecorder, module: Any) -> None:
    import torch.nn.utils as utils

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        clip = _unless_stopped(loop, getattr(module, name))
        setattr(module, name, clip)
        setattr(utils, name, clip)


def _scaling(loop: LoopRecorder, module: Any) -> None:
    for name in ("step", "unscale_", "update"):
        method = _unless_stopped(loop, getattr(module.GradScaler, name))
        setattr(module.GradScaler, name, method)


def _loaders(loop: LoopRecorder, module: Any) -> None:
    kind, loader = module._BaseDataLoaderIter, module.DataLoader
    fetch, make = kind.__next__, loader.__iter__

    def next_batch(self: Any) -> Any:
        if loop.busy or loop.elsewhere():
            return fetch(self)
        return loop.fetch(self, fetch)

    def new_iterator(self: Any) -> Any:
        if loop.busy or loop.elsewhere():
            return make(self)
        return loop.open(self, make)

    kind.__next__, loader.__iter__ = next_batch, new_iterator


def _profiling(recorder: Recorder, module: Any) -> None:
    """Kernels are sampled by PyTorch's profiler: a session of the script's goes first."""
    original = module.profile._prepare_trace

    @functools.wraps(original)
    def prepare(self: Any) -> Any:
        if recorder.kernel_sampler is not None:
            recorder.kernel_sampler.give_way()
        return original(self)

    module.profile._prepare_trace = prepare


def _saving(recorder: Recorder, names: list[str], module: Any) -> None:
    import torch

    for name in names:
        if hasattr(module, name):
            timed = _timed(getattr(module, name), State.CHECKPOINT, recorder)
            setattr(module, name, timed)
            if module.__name__ == "torch.serialization":
                setattr(torch, name, timed)


def _own_store(rendezvous: Any) -> None:
    """A script that starts its ranks itself, on a port of its own, has no agent to ask there."""
    original = rendezvous._torchelastic_use_agent_store

    def use_agent_store() -> bool:
        ours = os.environ.get("PACELINE_STORE_PORT", os.environ.get("MASTER_PORT"))
        return bool(original()) and os.environ.get("MASTER_PORT") == ours

    rendezvous._torchelastic_use_agent_store = use_agent_store


def _groups(recorder: Recorder, c10d: Any) -> None:
    """Every process group that the script makes, behind the recorded seam; what torch knows of
    it (its backend's name, its tags) stays as it was."""
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def helper(size: int, rank: int, members: list[int], *args: Any, **kwargs: Any) -> Any:
        # Of members alone; torch passes the backend and the store, and the name by its own.
        shared = args[1] if len(args) > 1 and rank is not None else None
        key = announce_check(shared, str(kwargs.get("group_name", args[2:3])))
        group, store = original(size, rank, members, *args, **kwargs)
        if group is c10d.GroupMember.NON_GROUP_MEMBER:
            return group, store
        if not members:
            recorder.join(group.rank(), group.size())
            measure_wrapper_cost(recorder)
        if not isinstance(group, RecordedGroup):
            checks = make_check(group, shared, key)
            name = str(c10d._world.pg_names[group])
            recorded = RecordedGroup(group, name, recorder, checks)
            replace_group(c10d, group, recorded)
            return recorded, store
        return group, store

    c10d._new_process_group_helper = helper
    _batches(c10d)
    group_shutdown.patch_destroy_process_group(c10d)


def replace_group(c10d: Any, group: Any, other: Any) -> None:
    """Put another process group in the place of the plain one, in torch's tables."""
    world = c10d._world
    name = world.pg_names[group]
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        if group in table:
            table[other] = table.pop(group)
    for tagged in world.tags_to_pg.values():
        tagged[:] = [other if one is group else one for one in tagged]
    if group.bound_device_id is not None:
        other.bound_device_id = group.bound_device_id
    other._set_group_name(name)
    other._set_group_desc(group.group_desc)
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    _unregister_process_group(name)
    _register_process_group(name, other)


def _batches(c10d: Any) -> None:
    """Sends and receives in one batch are coalesced by NCCL only for a plain group's type."""
    from torch import distributed

    dist: Any = distributed
    original = c10d.batch_isend_irecv

    @functools.wraps(original)
    def batch_isend_irecv(operations: list[Any]) -> Any:
        group = (operations and operations[0].group) or dist.group.WORLD
        if not isinstance(group, RecordedGroup):
            return original(operations)
        device = operations[0].tensor.device
        if not getattr(group._get_backend(device), "supports_coalescing", False):
            return original(operations)
        with c10d._coalescing_manager(group, device, async_ops=True) as coalesced:
            for one in operations:
                one.op(one.tensor, one.peer, one.group, one.tag)
        return coalesced.works

    c10d.batch_isend_irecv = batch_isend_irecv
    dist.batch_isend_irecv = batch_isend_irecv


def measure_hooks(loop: LoopRecorder) -> None:
    """Measure what a hook costs beside its event, in turns with the hook passing on. Before the
    script runs; what it records is forgotten by the caller."""
    import torch

    module = torch.nn.ReLU()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    nothing = torch.zeros(1)

    def plain() -> None:
        loop.stopped = True
        module(nothing)
        loop.stopped = False

    def recorded() -> None:
        loop.stopped = False
        module(nothing)
        loop.stopped = False

    recorder = loop.recorder
    recorder.hook_cost_ns = max(
        0.0, measure_difference_ns(plain, recorded) - recorder.event_cost_ns
    )
    loop.reset()
