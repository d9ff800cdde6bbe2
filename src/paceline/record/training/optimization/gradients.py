"""Observe the gradients that this rank computes, before any exchange."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...hooks.phases import UncopiedHook
from ...hooks.taps import Function, Tap
from ..observation import Observation
from ..user_lines import is_users_file, user_line
from .shards import Shard, shard_of

_HOOK = "the gradients"


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
        note = self._observation.guarded(_HOOK, self._before_users_hook)

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
        reference = weakref.ref(parameter)
        note = self._observation.guarded(_HOOK, self._note_raw)

        def hook(gradient: torch.Tensor) -> None:
            if self._observation.backward is not None and not self._observation.is_over:
                note(reference(), gradient)

        self._register(parameter, UncopiedHook(hook))

    def hook(self, parameter: torch.Tensor) -> None:
        """Observe the gradients of a parameter before any exchange."""
        if parameter in self._hooked or not parameter.requires_grad or not parameter.is_leaf:
            return
        if getattr(parameter, "_is_flat_param", False):
            return  # its gradient is a shard when it is used, at a position that is not known
        reference = weakref.ref(parameter)
        note = self._observation.guarded(_HOOK, self.note)

        def hook(gradient: torch.Tensor) -> None:
            if self._observation.backward is not None and not self._observation.is_over:
                note(reference(), gradient)

        self._hooked[parameter] = self._register(parameter, UncopiedHook(hook))

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
