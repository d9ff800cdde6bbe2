"""Patches of torch's functions that record a script which does not use Paceline's API.

They are installed once, before the script runs. Each replacement calls the original at once if
there is nothing to record; in a nested module that costs one comparison. They do not change any
results.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from ..ring.recorder import Recorder, measure_difference_ns, now
from ..ring.states import State
from . import group_shutdown, keras_training
from .collective_check import announce_check, make_check
from .collectives import RecordedGroup, measure_wrapper_cost
from .hook_failures import report_failure
from .horovod import operations as horovod_operations
from .import_hooks import after_import
from .sharded.block_labels import patch_param_groups
from .training_loop import LoopRecorder


def install(loop: LoopRecorder) -> None:
    """Patch torch in this process, now or when the script imports it."""
    recorder = loop.recorder
    patches: dict[str, Callable[[Any], None]] = {
        "torch.nn.modules.module": functools.partial(_patch_modules, loop),
        "torch.autograd": functools.partial(_patch_backward, loop),
        "torch.optim.optimizer": functools.partial(_patch_optimizers, loop),
        "torch.utils.data.dataloader": functools.partial(_patch_loaders, loop),
        "torch.distributed.distributed_c10d": functools.partial(_patch_groups, recorder),
        "torch.distributed.fsdp._fully_shard._fsdp_param_group": functools.partial(
            patch_param_groups, recorder
        ),
        "torch.distributed.rendezvous": _patch_agent_store,
        "torch.nn.utils.clip_grad": functools.partial(_patch_clipping, loop),
        "torch.amp.grad_scaler": functools.partial(_patch_grad_scaler, loop),
        "torch.serialization": functools.partial(_patch_saving, recorder, ["save"]),
        "torch.distributed.checkpoint.state_dict_saver": functools.partial(
            _patch_saving, recorder, ["save", "async_save", "save_state_dict"]
        ),
        "torch.autograd.profiler": functools.partial(_patch_profiler, recorder),
        horovod_operations.MODULE: functools.partial(horovod_operations.patch_operations, recorder),
        keras_training.TENSORFLOW_TRAINER: functools.partial(
            keras_training.patch_tensorflow_trainer, loop
        ),
        keras_training.TORCH_TRAINER: functools.partial(keras_training.patch_torch_trainer, loop),
        keras_training.MODEL: functools.partial(keras_training.patch_models, loop),
        "safetensors.torch": functools.partial(
            _patch_saving, recorder, ["save_file", "save_model"]
        ),
    }
    after_import({name: _guarded(name, patch) for name, patch in patches.items()})


def _guarded(name: str, patch: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the patch of a module so that a failure is reported: the script's import succeeds."""

    def apply(module: Any) -> None:
        try:
            patch(module)
        except Exception as error:
            report_failure(f"the import of {name}", error)

    return apply


def _timed(function: Callable[..., Any], state: State, recorder: Recorder) -> Callable[..., Any]:
    """Return ``function`` with its calls in the training thread recorded as ``state``."""

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != recorder.training_thread:
            return function(*args, **kwargs)
        start = now()
        recorder.begin(state, start)
        try:
            return function(*args, **kwargs)
        finally:
            recorder.event(state, start, now())

    return _seen_by_compiler_as(function, timed)


def _seen_by_compiler_as(function: Any, wrapper: Any) -> Callable[..., Any]:
    """Make torch.compile trace ``function`` in place of its wrapper; return the wrapper."""
    wrapper._torchdynamo_inline = function
    return cast(Callable[..., Any], wrapper)


def _patch_modules(loop: LoopRecorder, module: Any) -> None:
    patched_class = module.Module
    original = patched_class.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if loop.busy:  # the same as ``original``, without another frame
            if self._compiled_call_impl is not None:
                return self._compiled_call_impl(*args, **kwargs)
            return self._call_impl(*args, **kwargs)
        if loop.ignores_thread():
            return original(self, *args, **kwargs)
        return loop.forward(self, original, args, kwargs)

    functools.update_wrapper(call, original)
    patched_class.__call__ = call

    def known_to_dynamo(module: Any) -> None:
        # torch.compile inlines a module's forward only if its call is "unpatched".
        if hasattr(module, "unpatched_nn_module_call"):
            module.unpatched_nn_module_call = call

    after_import(
        {
            "torch._dynamo.utils": known_to_dynamo,
            "torch._dynamo.variables.nn_module": known_to_dynamo,
            # torch.compile must not trace the frames of this package.
            "torch._dynamo.trace_rules": lambda rules: rules.add("paceline"),
        }
    )


def _patch_backward(loop: LoopRecorder, module: Any) -> None:
    original = module._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if loop.busy or loop.ignores_thread():
            return original(*args, **kwargs)
        return loop.backward(original, args, kwargs)

    module._engine_run_backward = run_backward


def _patch_optimizers(loop: LoopRecorder, module: Any) -> None:
    module.register_optimizer_step_pre_hook(loop.before_step)
    module.register_optimizer_step_post_hook(loop.after_step)
    patched_class = module.Optimizer
    patched_class.zero_grad = _unless_stopped(loop, patched_class.zero_grad)


def _unless_stopped(loop: LoopRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    timed = _timed(function, State.OPTIMIZER, loop.recorder)

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if loop.stopped else timed)(*args, **kwargs)

    return _seen_by_compiler_as(function, chosen)


def _patch_clipping(loop: LoopRecorder, module: Any) -> None:
    import torch.nn.utils as utils

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        clip = _unless_stopped(loop, getattr(module, name))
        setattr(module, name, clip)
        setattr(utils, name, clip)


def _patch_grad_scaler(loop: LoopRecorder, module: Any) -> None:
    for name in ("step", "unscale_", "update"):
        method = _unless_stopped(loop, getattr(module.GradScaler, name))
        setattr(module.GradScaler, name, method)


def _patch_loaders(loop: LoopRecorder, module: Any) -> None:
    patched_class, loader = module._BaseDataLoaderIter, module.DataLoader
    fetch, make = patched_class.__next__, loader.__iter__

    def next_batch(self: Any) -> Any:
        if loop.busy or loop.ignores_thread():
            return fetch(self)
        return loop.fetch(self, fetch)

    def new_iterator(self: Any) -> Any:
        if loop.busy or loop.ignores_thread():
            return make(self)
        return loop.open(self, make)

    patched_class.__next__, loader.__iter__ = next_batch, new_iterator


def _patch_profiler(recorder: Recorder, module: Any) -> None:
    """End our kernel sampling, which uses PyTorch's profiler, when the script starts a session."""
    original = module.profile._prepare_trace

    @functools.wraps(original)
    def prepare(self: Any) -> Any:
        try:
            if recorder.kernel_sampler is not None:
                recorder.kernel_sampler.give_way()
        except Exception as error:
            report_failure("the profiler", error)
        return original(self)

    module.profile._prepare_trace = prepare


def _patch_saving(recorder: Recorder, names: list[str], module: Any) -> None:
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for name in names:
        original = getattr(module, name, None)
        if original is None:
            continue
        saving = original
        if name == "async_save":
            saving = functools.wraps(original)(_with_timed_waits(original, recorder))
        timed = _timed(saving, State.CHECKPOINT, recorder)
        for holder in (module, package):  # the package has the same functions
            if getattr(holder, name, None) is original:
                setattr(holder, name, timed)


def _with_timed_waits(save: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return an asynchronous ``save`` whose futures record waits for them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        response = save(*args, **kwargs)
        for name in ("", "staging_completion", "upload_completion"):  # PyTorch 2.9: two futures
            future = getattr(response, name, None) if name else response
            if isinstance(future, Future):
                future.result = _timed(  # type: ignore[method-assign]
                    future.result, State.CHECKPOINT, recorder
                )
        return response

    return call


def _patch_agent_store(rendezvous: Any) -> None:
    """Use the agent's store only at the agent's port.

    A script that starts its ranks itself, on another port, has no agent there.
    """
    original = rendezvous._torchelastic_use_agent_store

    def use_agent_store() -> bool:
        ours = os.environ.get("PACELINE_STORE_PORT", os.environ.get("MASTER_PORT"))
        return bool(original()) and os.environ.get("MASTER_PORT") == ours

    rendezvous._torchelastic_use_agent_store = use_agent_store


def _patch_groups(recorder: Recorder, c10d: Any) -> None:
    """Wrap every process group that the script makes in a ``RecordedGroup``.

    What torch knows of the group (its backend's name, its tags) does not change.
    """
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def helper(size: int, rank: int, members: list[int], *args: Any, **kwargs: Any) -> Any:
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

    c10d._new_process_group_helper = helper
    _patch_batched_p2p(c10d)
    group_shutdown.patch_destroy_process_group(c10d)


def replace_group(c10d: Any, group: Any, other: Any) -> None:
    """Replace ``group`` by ``other`` in torch's tables of process groups."""
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


def _patch_batched_p2p(c10d: Any) -> None:
    """Coalesce batched sends and receives: torch does so only for a plain group's type."""
    from torch import distributed

    dist: Any = distributed
    original = c10d.batch_isend_irecv

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
        group = (p2p_op_list and p2p_op_list[0].group) or dist.group.WORLD
        if not isinstance(group, RecordedGroup):
            return original(p2p_op_list)
        device = p2p_op_list[0].tensor.device
        if not getattr(group._get_backend(device), "supports_coalescing", False):
            return original(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as coalesced:
            for operation in p2p_op_list:
                operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
        return coalesced.works

    c10d.batch_isend_irecv = batch_isend_irecv
    dist.batch_isend_irecv = batch_isend_irecv


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
