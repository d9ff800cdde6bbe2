"""FSDP's hooks on tensors of which each rank holds a part.

FSDP gathers a block's parameters when the gradient of its output arrives, and reduces their
gradients after that of its input. A tensor that shows the shape of the whole carries its gradient
in ``local``, so FSDP's hooks belong there.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from .block_usage import groups_of


class PartOfTensor(Protocol):
    """A tensor of which ``local`` is this rank's part."""

    local: torch.Tensor

    def like(self, local: torch.Tensor) -> Any: ...


def hook_parts(model: nn.Module, kind: type[PartOfTensor]) -> None:
    """Let the hooks of all blocks of a sharded model see the parts of tensors of a kind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            state._register_pre_backward_hook = _on_parts(state._register_pre_backward_hook, kind)
            for group in groups_of(state):
                own: Any = group
                own._register_post_backward_hook = _on_parts(own._register_post_backward_hook, kind)


def _on_parts(register: Callable[..., Any], kind: type[PartOfTensor]) -> Callable[..., Any]:
    """Return a function that registers hooks on parts, and returns what it was given."""

    @functools.wraps(register)
    def on_parts(*given: Any) -> Any:
        leaves, structure = tree_flatten(given)
        if not any(isinstance(one, kind) for one in leaves):
            return register(*given)
        opened = [one.local if isinstance(one, kind) else one for one in leaves]
        found, structure = tree_flatten(register(*tree_unflatten(opened, structure)))
        closed = [_closed(*both, kind) for both in zip(leaves, found, strict=True)]
        return tree_unflatten(closed, structure)

    return on_parts


def _closed(before: Any, after: Any, kind: type[PartOfTensor]) -> Any:
    """Return a leaf as it was before, with what FSDP has made of its part."""
    if not isinstance(before, kind):
        return after
    return before if after is before.local else before.like(after)
