"""Observe models that FSDP2 shards: their gradients before they are reduced and scattered."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...hooks.import_hooks import after_import
from ...hooks.sharded.whole_gradients import whole_gradient
from ..observation import Observation
from ..user_lines import user_line
from .models import Models

_HOOK = "sharded models"
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
        """Patch FSDP2 when the script imports it."""
        after_import(
            {
                "torch.distributed.fsdp._fully_shard._fsdp_param": self._patch_parameters,
                "torch.distributed.fsdp._fully_shard._fully_shard": self._patch_module,
                "torch.distributed.fsdp._fully_shard": self._patch_name,
                "torch.distributed.fsdp": self._patch_name,
            }
        )

    def _patch_parameters(self, module: Any) -> None:
        kind = module.FSDPParam
        make = kind.init_unsharded_param
        note = self._observation.guarded(_HOOK, self._hook_gradient)

        @functools.wraps(make)
        def init_unsharded_param(parameter: Any) -> None:
            make(parameter)
            note(parameter)

        kind.init_unsharded_param = init_unsharded_param

    def _hook_gradient(self, parameter: Any) -> None:
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is None or whole in self._hooked or not whole.requires_grad:
            return
        self._hooked[whole] = True
        reference = weakref.ref(parameter)

        def accumulated() -> torch.Tensor | None:
            alive = reference()
            return None if alive is None else whole_gradient(alive)

        self._models.gradients.whole_gradients[parameter.sharded_param] = accumulated
        note = self._observation.guarded(_HOOK, self._models.gradients.note)

        def hook(gradient: Any) -> None:
            if self._observation.backward is not None and not self._observation.is_over:
                note(parameter.sharded_param, gradient)

        whole.register_hook(hook)

    def _patch_module(self, package: Any) -> None:
        function = package.fully_shard
        note = self._observation.guarded(_HOOK, self._note_wrapping)

        @functools.wraps(function)
        def fully_shard(module: Any, *args: Any, **options: Any) -> Any:
            note(module)
            return function(module, *args, **options)

        self._fully_shard = fully_shard
        package.fully_shard = fully_shard
        kind = package.FSDPModule
        switch = kind.set_requires_gradient_sync
        note_switch = self._observation.guarded(_HOOK, self._note_switch)

        @functools.wraps(switch)
        def set_requires_gradient_sync(
            model: Any, requires_gradient_sync: bool, *args: Any, **options: Any
        ) -> Any:
            note_switch(model, requires_gradient_sync)
            return switch(model, requires_gradient_sync, *args, **options)

        kind.set_requires_gradient_sync = set_requires_gradient_sync
        for name in REDUCTIONS:
            if hasattr(kind, name):
                setattr(kind, name, self._noting(getattr(kind, name)))

    def _noting(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that changes how gradients are reduced, and notes the line."""
        note = self._observation.guarded(_HOOK, self._models.note_exchange_hook)

        @functools.wraps(change)
        def call(model: Any, *args: Any, **options: Any) -> Any:
            note(model, user_line())
            return change(model, *args, **options)

        return call

    def _patch_name(self, module: Any) -> None:
        """Replace the function in a package that has imported it."""
        if hasattr(module, "fully_shard") and hasattr(self, "_fully_shard"):
            module.fully_shard = self._fully_shard

    def _note_wrapping(self, wrapped: Any) -> None:
        for module in wrapped if isinstance(wrapped, list | tuple) else [wrapped]:
            if isinstance(module, nn.Module):
                self._models.note_wrapping(module, user_line())

    def _note_switch(self, root: Any, is_on: bool) -> None:
        self._models.set_syncing(root, bool(is_on), user_line())
