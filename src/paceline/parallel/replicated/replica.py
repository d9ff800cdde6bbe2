"""DDP that behaves like the plain model, with buckets whose layout is final from the first step.

**Buckets.** DDP rebuilds its buckets after its first step, in the order in which gradients became
ready. With three or more ranks gloo's ring sums an element in an order that depends on its place in
the bucket, so a run that was resumed (and rebuilds later) would differ in the last bit from one
that never stopped. ``FixedBuckets`` gives DDP its final layout at once: parameters in reverse order
of registration, which is the order of backward through most models.

**Like the plain model.** A script runs on any number of ranks: keys of ``state_dict``, attributes,
methods, copies and pickles are those of the plain model.

**Gradients.** After each forward of its own, DDP synchronizes the gradients of one backward.
``is_armed`` says whether it would; ``distribution_check`` reports backwards where it does not.
"""

import copy
import functools
import inspect
import operator
import sys
import weakref
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...record.hooks.phases import UncopiedHook

BROADCAST_BYTES = 25 << 20  # of one message, as in DistributedDataParallel
# It removes DDP's prefix from the keys itself, and expects to find it.
_DCP_MODULE = "torch.distributed.checkpoint.state_dict"

replicas: weakref.WeakSet["FixedBuckets"] = weakref.WeakSet()


class LikePlainModule(nn.Module):
    """A module around the script's: attributes and keys of ``state_dict`` are those of that one.

    Attributes:
        module: The script's module.
        has_private_names: Whether names that begin with "_" are always those of the outer module.
    """

    module: nn.Module
    has_private_names: ClassVar[bool] = False

    def _inner(self) -> nn.Module | None:
        """Return the script's module; None before it is set."""
        inner: nn.Module | None = self.__dict__.get("_modules", {}).get("module")
        return inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._inner()
            if module is None or name.startswith("_"):
                raise
        return self._attribute_of(module, name)

    def _attribute_of(self, module: nn.Module, name: str) -> Any:
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module, is_private = self._inner(), self.has_private_names and name.startswith("_")
        is_own = name in self.__dict__ or name == "module" or hasattr(type(self), name)
        if module is not None and not is_own and not is_private and hasattr(module, name):
            setattr(module, name, value)
        else:
            super().__setattr__(name, value)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        plain: nn.Module = copy.deepcopy(self.module, memo)
        return plain


class FixedBuckets(LikePlainModule, DistributedDataParallel):
    """DDP whose bucket layout is final from the start.

    Attributes:
        is_armed: Whether a forward waits for the backward that synchronizes its gradients.
        has_run: Whether there was a forward whose gradients are synchronized.
    """

    has_private_names = True

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.is_armed = self.has_run = False
        self._buckets: set[int] = set()  # addresses of their memory
        self._method: str | None = None  # that runs in place of the module's forward
        super().__init__(module, **options)
        self.settle()
        replicas.add(self)

    def settle(self) -> None:
        """Rebuild the buckets of a new reducer at once."""
        if not self.find_unused_parameters:  # with unused parameters DDP never rebuilds
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        # DDP then starts with the last parameters, and never rebuilds
        if self.find_unused_parameters:
            return parameters, sparse
        return parameters[::-1], sparse[::-1]

    # Forward, and methods that compute like it

    def _run_ddp_forward(self, *inputs: Any, **options: Any) -> Any:
        if self._method is None:
            return super()._run_ddp_forward(*inputs, **options)  # type: ignore[no-untyped-call]
        method, self._method = self._method, None
        with self._inside_ddp_forward():
            return getattr(self.module, method)(*inputs, **options)

    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.is_armed = self.has_run = True
        return output

    def note_exchange(self, bucket: torch.Tensor) -> None:
        """Note that a backward reduces a bucket, which may be one of this model."""
        address = bucket.untyped_storage().data_ptr()
        if address not in self._buckets:
            gradients = (p.grad for p in self.module.parameters() if p.grad is not None)
            if all(gradient.untyped_storage().data_ptr() != address for gradient in gradients):
                return
            self._buckets.add(address)
        self.is_armed = False

    def _call_method(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the module; with a tensor among its arguments as DDP's forward."""
        if not has_tensor(args, options):
            return getattr(self.module, name)(*args, **options)
        self._method = name
        try:
            return self(*args, **options)
        finally:
            self._method = None

    # Like the plain model

    def _attribute_of(self, module: nn.Module, name: str) -> Any:
        if name in own_methods(module):
            return functools.partial(self._call_method, name)
        return super()._attribute_of(module, name)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == _DCP_MODULE:
            return DistributedDataParallel.state_dict(self, *args, **options)
        return super().state_dict(*args, **options)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Accept the keys of ``state_dict`` where this is a part of another module."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            inner = key.removeprefix(prefix)
            if not inner.startswith("module."):
                state_dict[f"{prefix}module.{inner}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __copy__(self) -> nn.Module:
        plain: nn.Module = copy.copy(self.module)
        return plain

    def __reduce_ex__(self, _: Any) -> Any:
        return operator.getitem, ((self.module,), 0)  # can be loaded without Paceline


def accept_prefixed_keys(model: nn.Module) -> None:
    """Let a plain model load the keys of a state that DDP has written (``module.NAME``)."""

    def strip(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        before = f"{prefix}module."
        if not hasattr(model, "module") and all(key.startswith(before) for key in state):
            for key in list(state):
                state[prefix + key.removeprefix(before)] = state.pop(key)

    model.register_load_state_dict_pre_hook(UncopiedHook(strip))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module without DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def own_methods(module: object) -> list[str]:
    """Return the public methods that the user's class adds to nn.Module and torch's classes."""
    names: dict[str, None] = {}
    for base in type(module).__mro__:
        if base.__module__.partition(".")[0] == "torch" or base is object:
            continue
        for name, value in vars(base).items():
            is_public = inspect.isfunction(value) and not name.startswith("_")
            if is_public and not hasattr(nn.Module, name):
                names[name] = None
    return list(names)


def has_tensor(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether a method is called with a tensor, as a forward is."""
    return any(isinstance(argument, torch.Tensor) for argument in (*args, *options.values()))
