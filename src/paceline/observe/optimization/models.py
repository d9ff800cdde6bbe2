"""Observe models: their parameters, their forwards, and the gradients that this rank computes."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ...record.hooks import taps
from ...record.hooks.block_labels import whole_gradient
from ...record.hooks.phases import UncopiedHook
from ...record.hooks.taps import Function, Tap
from ..facts.models import FLAT, ModelFacts, ParameterFacts
from ..facts.samples import Phase
from ..observation import Observation
from ..user_lines import is_users_file, user_line
from .parameters import Shard, clean_name, is_own_batch_norm, named_parameters, shard_of, unwrapped

# Gradients


_GRADIENTS = "the gradients"


class Gradients:
    """The gradients of the parameters of this process.

    Args:
        observation: Receives the rows.
        name_of: Returns "MODEL KEY/NAME" of a parameter; None if it is of no model.
        add_hook_line: Called with that name and the line of a hook that changes its gradient.
    """

    def __init__(
        self,
        observation: Observation,
        name_of: Callable[[torch.Tensor], str | None],
        add_hook_line: Callable[[str, str], None],
    ) -> None:
        self._observation = observation
        self._name_of, self._add_hook_line = name_of, add_hook_line
        self._hooked: WeakIdKeyDictionary = WeakIdKeyDictionary()  # handles, by parameter
        self.loose: WeakIdKeyDictionary = WeakIdKeyDictionary()  # names of parameters of no model
        self._users_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # lines, by parameter
        self._later_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of summed gradients
        self._taken: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # By sharded parameter, the gradient that it accumulates before it is reduced.
        self.whole_gradients: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._register: Any = torch.Tensor.register_hook

    def install(self) -> None:
        """Observe gradients also before the hooks that the script registers."""
        note = self._observation.guarded(_GRADIENTS, self._before_users_hook)

        def register_hook(register: Function, tensor: Any, hook: Callable[..., Any]) -> Any:
            if not (tensor.is_leaf and tensor.requires_grad and self._observation.is_observed):
                return register(tensor, hook)
            note(tensor)
            handle = register(tensor, hook)
            if tensor in self._hooked:  # the gradient is observed after all hooks of the script
                self._hooked.pop(tensor).remove()
                self.hook(tensor)
            return handle

        def noting_lines(add: Function) -> Function:
            def register_post_accumulate_grad_hook(tensor: Any, hook: Callable[..., Any]) -> Any:
                if is_users_file(sys._getframe(1).f_code.co_filename):
                    self._later_hooks[tensor] = user_line()
                return add(tensor, hook)

            return register_post_accumulate_grad_hook

        Tap("torch", "Tensor.register_hook").around(register_hook)
        Tap("torch", "Tensor.register_post_accumulate_grad_hook").wrap(noting_lines)

    def _name(self, parameter: Any) -> str | None:
        return self._name_of(parameter) or self.loose.get(parameter)

    def _before_users_hook(self, parameter: torch.Tensor) -> None:
        if parameter in self._users_hooks:
            return
        self._users_hooks[parameter] = user_line()
        self.note_gradients(parameter, self._note_raw, weakref.ref(parameter))

    def note_gradients(
        self,
        computed: torch.Tensor,
        note: Callable[[Any, torch.Tensor], None],
        parameter: Callable[[], Any],
    ) -> Any:
        """Call ``note(parameter(), gradient)`` with each gradient of a tensor in a backward.

        Returns the handle of the hook.
        """
        note = self._observation.guarded(_GRADIENTS, note)

        def hook(gradient: torch.Tensor) -> None:
            if self._observation.backward is not None and not self._observation.is_over:
                note(parameter(), gradient)

        return self._register(computed, UncopiedHook(hook))

    def hook(self, parameter: torch.Tensor) -> None:
        """Observe the gradients of a parameter before any exchange."""
        if parameter in self._hooked or not parameter.requires_grad or not parameter.is_leaf:
            return
        if getattr(parameter, "_is_flat_param", False):
            return  # its gradient is a shard when it is used, at a position that is not known
        self._hooked[parameter] = self.note_gradients(parameter, self.note, weakref.ref(parameter))

    def note(self, parameter: Any, gradient: torch.Tensor) -> None:
        """Note the gradient of a parameter that this rank has computed."""
        backward = self._observation.backward
        name = self._name(parameter)
        if backward is None or name is None:
            return
        shard = shard_of(gradient)
        if not isinstance(shard, Shard):
            self._observation.add_unseen(f"gradient of {name}: {shard}")
            return
        rows = self._observation.rows
        row = rows.add(shard.values, shard.offset)
        if parameter in self._later_hooks:
            self._add_hook_line(name, self._later_hooks[parameter])
        raw = backward.raw.get(name)
        if raw is not None:
            if rows.are_equal(raw, row):
                del backward.raw[name]
            else:
                self._add_hook_line(name, self._users_hooks.get(parameter, ""))
        if name in backward.gradients:  # a backward inside of this one, as in checkpointing
            row = rows.add_sum(backward.gradients[name], row)
        backward.gradients[name] = row

    def _note_raw(self, parameter: Any, gradient: torch.Tensor) -> None:
        """Note the gradient of a parameter before the hooks of the script."""
        backward = self._observation.backward
        name = self._name(parameter)
        shard = shard_of(gradient)
        if backward is not None and name is not None and isinstance(shard, Shard):
            backward.raw[name] = self._observation.rows.add(shard.values, shard.offset)

    def note_taken(self) -> None:
        """Note the gradients that a hook has cleared in a backward: it adds them up elsewhere."""
        for parameter in list(self._hooked):
            if getattr(parameter, "_post_accumulate_grad_hooks", None) and _is_cleared(
                parameter.grad
            ):
                self._taken[parameter] = True

    def forget_cleared(self) -> None:
        """Leave out of earlier backwards of this step the gradients that were cleared since."""
        earlier = [one for one in self._observation.backwards if not one.is_returned]
        if not earlier or self._observation.settings.accumulates:
            return  # a replay in parts collects the gradient of each part itself
        for parameter in list(self._hooked):
            name = self._name(parameter)
            if name is None or not any(name in one.gradients for one in earlier):
                continue
            gradient = parameter.grad
            if gradient is None and (whole := self.whole_gradients.get(parameter)) is not None:
                gradient = whole()  # FSDP2: not yet reduced
            if parameter not in self._taken and _is_cleared(gradient):
                for one in earlier:
                    one.gradients.pop(name, None)


def _is_cleared(gradient: torch.Tensor | None) -> bool:
    return gradient is None or not (gradient.is_sparse or bool(gradient.any()))


_HOOK = "the models"
_TRANSPARENT = ("OptimizedModule", "DataParallel")  # wrappers without a synchronization
MAX_LINES = 8  # of a model


@dataclass
class Model:
    """A model of the script.

    Attributes:
        facts: Its facts.
        module: The user's module, without wrappers.
        has_trained: Whether a forward with gradient was seen.
        forwards: Number of forwards with gradient.
        is_syncing: Whether the backward of the last forward synchronizes gradients.
        autocast: dtype of autocast in the last forward; "" without autocast.
        is_compiled: Whether torch.compile compiles it.
    """

    facts: ModelFacts
    module: "weakref.ref[nn.Module]"
    has_trained: bool = False
    forwards: int = 0
    is_syncing: bool = True
    autocast: str = ""
    is_compiled: bool = False
    ddp: "weakref.ref[nn.Module] | None" = None


@dataclass(frozen=True)
class _Wrapping:
    """What was known of a parameter when its model was wrapped."""

    row: int
    requires_grad: bool


class Models:
    """The models of this process.

    Args:
        observation: Receives the facts.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self.gradients = Gradients(observation, self.name_of, self._add_hook_line)
        self.models: list[Model] = []
        self.last: Model | None = None  # whose forward with gradient was the last one
        self.is_inside = False  # of a forward
        self.inputs: tuple[Any, ...] = ()  # of the last outermost call
        self.before_forward: list[Callable[[Model, bool], None]] = []
        self.after_forward: list[Callable[[Model, Any], None]] = []
        self.on_wrapping: list[Callable[[], None]] = []
        self.before_first: list[Callable[[Model], None]] = []
        self._parents: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._roots: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._wrapped: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by name, by module
        self._wrapping_lines: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._comm_hook_lines: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unsynced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # FSDP2 models
        self._calls: WeakIdKeyDictionary = WeakIdKeyDictionary()  # has parameters, by module

    def install(self) -> None:
        """Subscribe to the calls of modules and the construction of wrappers."""
        nn.modules.module.register_module_module_registration_hook(self._note_parent)
        taps.wrap_forwards(self._forwards)
        guarded = self._observation.guarded
        taps.REPLICA.before(guarded(_HOOK, self._note_ddp))
        taps.NO_SYNC.before(guarded(_HOOK, self._note_no_sync))
        taps.REPLICA_HOOK.before(
            lambda replica, *_, **__: self.note_exchange_hook(replica, user_line())
        )
        self.gradients.install()

    def _forwards(self, original: taps.Function) -> taps.Function:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            # A backward may repeat forwards of parts (activation checkpointing).
            ignores = self.is_inside or self._observation.backward is not None
            if ignores or not self._observation.is_observed:
                return original(module, *args, **kwargs)
            return self._forward(module, original, args, kwargs)

        return call

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return "MODEL KEY/NAME" of a parameter; None if it is of no model."""
        return self._names.get(parameter)  # type: ignore[no-any-return]

    def _add_hook_line(self, name: str, line: str) -> None:
        key = name.partition("/")[0]
        if key.isdigit():
            _add_line(self.models[int(key)].facts.hook_lines, line)

    # Forwards

    def _forward(self, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        guarded = self._observation.guarded
        self.inputs = args or tuple(kwargs.values())
        model = guarded(_HOOK, self._enter)(module)
        self.inputs = ()
        if model is None:
            return call(module, *args, **kwargs)
        self.is_inside = True
        try:
            output = call(module, *args, **kwargs)
        finally:
            was_inside, self.is_inside = self.is_inside, False
        if was_inside:
            for after in self.after_forward:
                guarded(_HOOK, after)(model, output)
        return output

    def _enter(self, module: nn.Module) -> Model | None:
        """Note a forward of an outermost module; return its model, None if it has none."""
        if torch._C._is_tracing() or not self._has_parameters(module):
            return None
        called, ddp = unwrapped(module)
        root, wrapper = self._root_of(called)
        found = self._roots.get(root)
        model: Model = found or self._add(root, ddp or wrapper)
        is_training = torch.is_grad_enabled()
        if wrapper is not None and ddp is None and is_training:
            _add_line(model.facts.outside_forwards, user_line())
        if is_training:
            self._enter_training(model, root, ddp, module)
        elif self._observation.phase != Phase.TRAINING or self._observation.unassigned:
            self._observation.phase = Phase.EVALUATION
        for before in self.before_forward:
            before(model, is_training)
        return model

    def _enter_training(self, model: Model, root: nn.Module, ddp: Any, module: Any) -> None:
        self.last = model
        model.forwards += 1
        if ddp is not None:
            model.is_syncing = bool(ddp.require_backward_grad_sync)
            _add_line(model.facts.exchange_hook_lines, self._comm_hook_lines.get(ddp, ""))
        elif model.facts.is_sharded:
            model.is_syncing = not self._unsynced.get(root, False)
        model.autocast = _autocast()
        if any(type(one).__name__ == "OptimizedModule" for one in (module, root)):
            model.is_compiled = True
        if not model.has_trained:
            model.has_trained = True
            self._observation.note_rank()
            for before in self.before_first:
                before(model)
            self._note_first(model, root)
        for parameter in root.parameters():
            self.gradients.hook(parameter)

    def _has_parameters(self, module: nn.Module) -> bool:
        known = self._calls.get(module)
        if known is None:
            parameters = list(nn.Module.parameters(module))
            if any(isinstance(one, nn.parameter.UninitializedParameter) for one in parameters):
                return False  # its shapes are known after this forward
            known = self._calls[module] = bool(parameters)
        return bool(known)

    def _root_of(self, module: nn.Module) -> tuple[nn.Module, Any]:
        """Return the user's whole module that contains ``module``, and a synchronizing wrapper."""
        if module in self._roots and module not in self._parents:
            return module, None
        seen = {id(module)}
        while (parent := self._parent(module)) is not None and id(parent) not in seen:
            if isinstance(parent, DistributedDataParallel):
                return module, parent
            if type(parent).__name__ in _TRANSPARENT:
                above = self._parent(parent)
                return module, above if isinstance(above, DistributedDataParallel) else None
            module = parent
            seen.add(id(module))
        return module, None

    def _parent(self, module: nn.Module) -> nn.Module | None:
        reference = self._parents.get(module)
        return reference() if reference is not None else None

    def _note_parent(self, module: nn.Module, name: str, child: Any) -> None:
        if isinstance(child, nn.Module):
            self._parents[child] = weakref.ref(module)

    # Facts

    def _add(self, root: nn.Module, ddp: Any) -> Model:
        key = len(self.models)
        inside = next((m for m in root.modules() if isinstance(m, DistributedDataParallel)), None)
        ddp = ddp or inside
        is_flat = any(type(one).__name__ == FLAT for one in root.modules())
        is_sharded = is_flat or any(type(x).__name__.startswith("FSDP") for x in root.modules())
        sharding = FLAT if is_flat else "FSDP2" * is_sharded
        facts = ModelFacts(
            key=key,
            class_name=type(root).__name__.removeprefix("FSDP" * is_sharded),
            wrapper="DistributedDataParallel" if ddp is not None else sharding,
            line=self._wrapping_lines.get(ddp if ddp is not None else root) or user_line(),
            is_sharded=is_sharded,
            broadcasts_buffers=bool(ddp is not None and ddp.broadcast_buffers),
            parameters=[],
            ignored=sorted(getattr(ddp, "parameters_to_ignore", ())),
            batch_norms=[name for name, one in root.named_modules() if is_own_batch_norm(one)],
        )
        reference = weakref.ref(ddp) if ddp is not None else None
        model = Model(facts, weakref.ref(root), ddp=reference)
        wrappings = {
            clean_name(f"{prefix}.{name}".lstrip(".")): wrapping
            for prefix, owner in root.named_modules()
            for name, wrapping in self._wrapped.get(owner, {}).items()
        }
        for module in root.modules() if is_sharded else ():
            _add_line(facts.exchange_hook_lines, self._comm_hook_lines.get(module, ""))
        for name, parameter in named_parameters(root):
            wrapped = wrappings.get(name)
            shard = shard_of(parameter)
            if isinstance(shard, str):
                self._observation.add_unseen(f"parameter {name}: {shard}")
                continue
            facts.parameters.append(
                ParameterFacts(
                    name=name,
                    # Of a part of a flat parameter, the whole shape is not known.
                    shape=[shard.values.numel() * self._observation.facts.size]
                    if is_flat
                    else shard.shape,
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    requires_grad=wrapped.requires_grad if wrapped else parameter.requires_grad,
                    shard_numel=shard.values.numel(),
                )
            )
            self._names.setdefault(parameter, f"{key}/{name}")
            if wrapped is not None:
                facts.initial[name] = wrapped.row
        self._roots[root] = model
        self.models.append(model)
        self._observation.facts.models.append(facts)
        return model

    def _note_first(self, model: Model, root: nn.Module) -> None:
        model.facts.first = self.add_rows(named_parameters(root))
        model.facts.initial = model.facts.first | model.facts.initial

    def add_row(self, tensor: torch.Tensor) -> int | None:
        """Add the row of a tensor, or of this rank's shard of it; None if it has none."""
        shard = shard_of(tensor)
        if isinstance(shard, str):
            return None
        return self._observation.rows.add(shard.values, shard.offset)

    def add_rows(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        """Add the rows of some tensors; return them by name, without tensors that have none."""
        rows = ((name, self.add_row(tensor)) for name, tensor in tensors)
        return {name: row for name, row in rows if row is not None}

    def _note_ddp(self, wrapper: Any, module: nn.Module, *_: Any, **__: Any) -> None:
        line = user_line()
        self._wrapping_lines[wrapper] = line
        self.note_wrapping(module, line)

    def note_wrapping(self, module: nn.Module, line: str) -> None:
        """Note the parameters of a module before it is wrapped in a line of the script."""
        for call in self.on_wrapping:
            call()
        self._wrapping_lines[module] = line
        for owner in module.modules():
            found = self._wrapped.setdefault(owner, {})
            for name, parameter in owner._parameters.items():
                if parameter is None or name in found or hasattr(parameter, "placements"):
                    continue
                row = self.add_row(parameter)
                if row is not None:
                    found[name] = _Wrapping(row, parameter.requires_grad)

    def set_syncing(self, module: nn.Module, is_on: bool, line: str) -> None:
        """Note that the synchronization of a sharded model was switched on or off."""
        self._unsynced[module] = not is_on
        model = self._roots.get(module)
        if model is not None and not is_on:
            _add_line(model.facts.no_sync_lines, line)

    def note_exchange_hook(self, module: nn.Module, line: str) -> None:
        """Note that a line of the script changed how a wrapper exchanges gradients."""
        self._comm_hook_lines[module] = line

    def _note_no_sync(self, wrapper: Any) -> None:
        root, _ = unwrapped(wrapper)
        model = self._roots.get(root)
        if model is not None:
            _add_line(model.facts.no_sync_lines, user_line())

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield "MODEL KEY/NAME" and value of each floating-point buffer of the trained models."""
        for model in self.models:
            root = model.module()
            if root is not None and model.has_trained:
                for name, buffer in root.named_buffers():
                    if buffer.is_floating_point():
                        yield f"{model.facts.key}/{clean_name(name)}", buffer


def _autocast() -> str:
    """Return the dtype of autocast, or ""."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""


def _add_line(lines: list[str], line: str) -> None:
    if line and line not in lines and len(lines) < MAX_LINES:
        lines.append(line)


# Models that FSDP2 shards: their gradients before they are reduced and scattered


_SHARDED = "sharded models"
_FSDP2 = "torch.distributed.fsdp._fully_shard"
# Methods of FSDPModule that change how gradients are reduced.
REDUCTIONS = (
    *("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"),
    *("set_force_sum_reduction_for_comms", "set_all_reduce_hook", "set_custom_reduce_scatter"),
)


class ShardedModels:
    """The sharded models of this process.

    Args:
        observation: Receives the facts.
        models: Know the names of parameters.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        self._hooked: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def install(self) -> None:
        """Subscribe to FSDP2."""
        guarded = self._observation.guarded
        Tap(f"{_FSDP2}._fsdp_param", "FSDPParam.init_unsharded_param").after(
            guarded(_SHARDED, self._hook_gradient)
        )
        module = f"{_FSDP2}._fully_shard"
        Tap(module, "fully_shard").before(guarded(_SHARDED, self._note_wrapping))
        Tap(module, "FSDPModule.set_requires_gradient_sync").before(
            guarded(_SHARDED, self._note_switch)
        )
        for name in REDUCTIONS:
            tap = Tap(module, f"FSDPModule.{name}", is_optional=True)
            tap.before(guarded(_SHARDED, self._note_reduction))

    def _hook_gradient(self, _: None, parameter: Any) -> None:
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is None or whole in self._hooked or not whole.requires_grad:
            return
        self._hooked[whole] = True
        reference = weakref.ref(parameter)

        def accumulated() -> torch.Tensor | None:
            alive = reference()
            return None if alive is None else whole_gradient(alive)

        gradients = self._models.gradients
        gradients.whole_gradients[parameter.sharded_param] = accumulated
        gradients.note_gradients(whole, gradients.note, lambda: parameter.sharded_param)

    def _note_wrapping(self, module: Any, *_: Any, **__: Any) -> None:
        for part in module if isinstance(module, list | tuple) else [module]:
            if isinstance(part, nn.Module):
                self._models.note_wrapping(part, user_line())

    def _note_switch(self, root: Any, requires_gradient_sync: bool, *_: Any, **__: Any) -> None:
        self._models.set_syncing(root, bool(requires_gradient_sync), user_line())

    def _note_reduction(self, root: Any, *_: Any, **__: Any) -> None:
        """Note the line that changes how gradients are reduced."""
        self._models.note_exchange_hook(root, user_line())
