"""Taps: the functions of torch at which a training is observed, and how they are replaced.

Subscribers (the recorder, experiments, the observer of ``paceline verify``, the guard of a
reference, knobs) replace the function of a tap by a wrapper, now or when the script imports its
module. A later subscriber wraps an earlier one. A replacement that fails is reported, and the
script's import succeeds.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .hook_failures import report_failure
from .import_hooks import Patch, after_import

Function = Callable[..., Any]
_MODULES = "torch.nn.modules.module"
_OPTIMIZERS = "torch.optim.optimizer"
_LOADERS = "torch.utils.data.dataloader"
_SCALERS = "torch.amp.grad_scaler"
_REPLICAS = "torch.nn.parallel.distributed"
_SHARED_CHECKPOINTS = "torch.distributed.checkpoint"


def on_import(module: str, patch: Patch) -> None:
    """Call ``patch`` with a module, now or after its import. An exception in it is reported."""

    def guarded(imported: Any) -> None:
        try:
            patch(imported)
        except Exception as error:
            report_failure(f"the import of {module}", error)

    after_import({module: guarded})


def replace(
    owner: Any, name: str, wrapper_of: Callable[[Function], Function], is_traced: bool = False
) -> Callable[[], None]:
    """Replace a function of a module or a class by ``wrapper_of(function)``.

    Packages above the module that have imported the function get the wrapper as well.

    is_traced: Whether torch.compile traces the function in place of its wrappers.

    Returns:
        A function that restores the replaced one.
    """
    function = getattr(owner, name)
    wrapper: Any = functools.update_wrapper(wrapper_of(function), function)
    if is_traced:
        wrapper._torchdynamo_inline = getattr(function, "_torchdynamo_inline", function)
    owners = [owner]
    package = owner.__name__.rpartition(".")[0] if isinstance(owner, ModuleType) else ""
    while package:
        above = sys.modules.get(package)
        if getattr(above, "__dict__", {}).get(name) is function:
            owners.append(above)
        package = package.rpartition(".")[0]

    def put(replacement: Any) -> None:
        for place in owners:
            setattr(place, name, replacement)

    put(wrapper)
    return functools.partial(put, function)


def around(owner: Any, name: str, call: Callable[..., Any]) -> Callable[[], None]:
    """Call ``call`` with a function of a module or a class, and its arguments, in its place.

    Return a function that restores it.
    """
    return replace(owner, name, functools.partial(_wrapper, call))


def _wrapper(call: Callable[..., Any], function: Function) -> Function:
    return lambda *args, **options: call(function, *args, **options)


@dataclass(frozen=True)
class Tap:
    """A function or method that subscribers wrap.

    Attributes:
        module: Name of its module.
        name: Its name there, such as "GradScaler.scale".
        is_optional: Whether some versions of the library do not have it.
        is_traced: Whether torch.compile traces the function in place of its wrappers.
    """

    module: str
    name: str
    is_optional: bool = False
    is_traced: bool = False

    def wrap(self, wrapper_of: Callable[[Function], Function]) -> None:
        """Replace the function by ``wrapper_of(function)``."""

        def patch(module: Any) -> None:
            path, _, name = self.name.rpartition(".")
            owner = getattr(module, path) if path else module
            if hasattr(owner, name) or not self.is_optional:
                replace(owner, name, wrapper_of, self.is_traced)

        on_import(self.module, patch)

    def around(self, call: Callable[..., Any]) -> None:
        """Call ``call`` with the function and the arguments in place of the function."""
        self.wrap(functools.partial(_wrapper, call))

    def before(self, note: Callable[..., Any]) -> None:
        """Call ``note`` with the arguments before each call."""

        def call(function: Function, /, *args: Any, **options: Any) -> Any:
            note(*args, **options)
            return function(*args, **options)

        self.around(call)

    def after(self, note: Callable[..., Any]) -> None:
        """Call ``note`` with the result and the arguments after each call that returns."""

        def call(function: Function, /, *args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            note(result, *args, **options)
            return result

        self.around(call)


def _traced(module: str, name: str, is_optional: bool = False) -> Tap:
    return Tap(module, name, is_optional, is_traced=True)


BATCH = Tap(_LOADERS, "_BaseDataLoaderIter.__next__")
BATCH_INDEX = Tap(_LOADERS, "_BaseDataLoaderIter._next_index")
LOADER = Tap(_LOADERS, "DataLoader.__init__")
LOADER_LENGTH = Tap(_LOADERS, "DataLoader.__len__")
EPOCH = Tap(_LOADERS, "DataLoader.__iter__")  # an iterator over a loader is made
BACKWARD = Tap("torch.autograd", "_engine_run_backward")
OPTIMIZER = Tap(_OPTIMIZERS, "Optimizer.__init__")
ZERO_GRADIENTS = _traced(_OPTIMIZERS, "Optimizer.zero_grad")
CLIPPING = [_traced("torch.nn.utils.clip_grad", f"clip_grad_{x}_") for x in ("norm", "value")]
SCALER = Tap(_SCALERS, "GradScaler.__init__")
SCALE_LOSS = Tap(_SCALERS, "GradScaler.scale")
UNSCALE = _traced(_SCALERS, "GradScaler.unscale_")
SCALED_STEP = _traced(_SCALERS, "GradScaler.step")
UPDATE_SCALE = _traced(_SCALERS, "GradScaler.update")
REPLICA = Tap(_REPLICAS, "DistributedDataParallel.__init__")
REPLICA_FORWARD = Tap(_REPLICAS, "DistributedDataParallel.forward")
REPLICA_FORWARD_END = Tap(_REPLICAS, "DistributedDataParallel._post_forward")
REPLICA_HOOK = Tap(_REPLICAS, "DistributedDataParallel.register_comm_hook")
NO_SYNC = Tap(_REPLICAS, "DistributedDataParallel.no_sync")
NEW_GROUP = Tap("torch.distributed.distributed_c10d", "_new_process_group_helper")
# Checkpoints: each rank's own, and those of all ranks together.
SAVE, LOAD = _traced("torch.serialization", "save"), Tap("torch.serialization", "load")
SAVE_TENSORS = _traced("safetensors.torch", "save_file")
LOAD_TENSORS = Tap("safetensors.torch", "load_file")
SAVE_MODEL_TENSORS = _traced("safetensors.torch", "save_model", is_optional=True)
SHARED_SAVE = _traced(f"{_SHARED_CHECKPOINTS}.state_dict_saver", "save")
SHARED_ASYNC_SAVE = _traced(f"{_SHARED_CHECKPOINTS}.state_dict_saver", "async_save")
SHARED_OLD_SAVE = _traced(f"{_SHARED_CHECKPOINTS}.state_dict_saver", "save_state_dict", True)
SHARED_LOAD = Tap(f"{_SHARED_CHECKPOINTS}.state_dict_loader", "load")
LOAD_MODEL = Tap(_MODULES, "Module.load_state_dict")
LOAD_OPTIMIZER = Tap(_OPTIMIZERS, "Optimizer.load_state_dict")
LOAD_SCHEDULE = Tap("torch.optim.lr_scheduler", "LRScheduler.load_state_dict")


def wrap_forwards(wrapper_of: Callable[[Function], Function]) -> None:
    """Replace ``Module.__call__`` by its wrapper. torch.compile still inlines forwards."""

    def patch(module: Any) -> None:
        kind = module.Module
        original = kind.__call__
        kind.__call__ = functools.update_wrapper(wrapper_of(original), original)

        def known_to_dynamo(part: Any) -> None:
            # torch.compile inlines a module's forward only if its call is "unpatched".
            if hasattr(part, "unpatched_nn_module_call"):
                part.unpatched_nn_module_call = kind.__call__

        after_import(
            {
                "torch._dynamo.utils": known_to_dynamo,
                "torch._dynamo.variables.nn_module": known_to_dynamo,
                # torch.compile must not trace the frames of this package.
                "torch._dynamo.trace_rules": lambda rules: rules.add("paceline"),
            }
        )

    on_import(_MODULES, patch)


def on_step(
    before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    """Call functions with the optimizer before and after each step of any optimizer.

    They are never removed: a hook that ends a run would change the table that torch iterates over.
    """

    def register(module: Any) -> None:
        if before is not None:
            module.register_optimizer_step_pre_hook(before)
        if after is not None:
            module.register_optimizer_step_post_hook(after)

    on_import(_OPTIMIZERS, register)


def parameters_of(*optimizers: Any) -> list[Any]:
    """Return the parameters of optimizers."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def on_loss(note: Callable[[Any], None]) -> None:
    """Call ``note`` with each tensor whose backward begins, before a gradient scaler has scaled it.

    ``torch.autograd.grad``, backwards of several tensors, and those that recompute inside of
    another one are left out.
    """

    def remember(scaled: Any, scaler: Any, outputs: Any) -> None:
        if hasattr(outputs, "detach") and hasattr(scaled, "detach"):
            scaled._paceline_unscaled = outputs.detach()

    def begins(tensors: Any, *_: Any, **options: Any) -> None:
        import torch

        is_outermost = torch._C._current_graph_task_id() == -1
        if is_outermost and len(tensors) == 1 and options.get("accumulate_grad", True):
            note(getattr(tensors[0], "_paceline_unscaled", tensors[0]))

    SCALE_LOSS.after(remember)
    BACKWARD.before(begins)
