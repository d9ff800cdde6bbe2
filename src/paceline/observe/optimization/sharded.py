"""Observe models that FSDP2 shards: their gradients before they are reduced and scattered."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...record.hooks.sharded.block_labels import whole_gradient
from ...record.hooks.taps import Tap
from ..observation import Observation
from ..user_lines import user_line
from .models import Models

_HOOK = "sharded models"
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
            guarded(_HOOK, self._hook_gradient)
        )
        module = f"{_FSDP2}._fully_shard"
        Tap(module, "fully_shard").before(guarded(_HOOK, self._note_wrapping))
        Tap(module, "FSDPModule.set_requires_gradient_sync").before(
            guarded(_HOOK, self._note_switch)
        )
        for name in REDUCTIONS:
            tap = Tap(module, f"FSDPModule.{name}", is_optional=True)
            tap.before(guarded(_HOOK, self._note_reduction))

    def _hook_gradient(self, _: None, parameter: Any) -> None:
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

    def _note_wrapping(self, module: Any, *_: Any, **__: Any) -> None:
        for part in module if isinstance(module, list | tuple) else [module]:
            if isinstance(part, nn.Module):
                self._models.note_wrapping(part, user_line())

    def _note_switch(self, root: Any, requires_gradient_sync: bool, *_: Any, **__: Any) -> None:
        self._models.set_syncing(root, bool(requires_gradient_sync), user_line())

    def _note_reduction(self, root: Any, *_: Any, **__: Any) -> None:
        """Note the line that changes how gradients are reduced."""
        self._models.note_exchange_hook(root, user_line())
