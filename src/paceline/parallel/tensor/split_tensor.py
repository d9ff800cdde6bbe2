"""A tensor of which each rank of the tensor axis holds a piece.

A function of torch that has a rule (``rules/``) computes with the pieces; any other one gets the
whole tensors, which takes longer and has the same result. Functions that change a tensor in place
and have no rule are an error.
"""

import threading
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..divided.divided_tensor import (
    NO_RULE,
    DividedTensor,
    Rule,
    Rules,
    as_whole,
    changes_divided,
    divided_tensors,
    function_name,
    getters,
    named_functions,
)
from ..divided.module_names import place
from ..divided.rules import register_rules
from . import exchange
from .exchange import TensorAxis, scattered, shared
from .splits import Split, moved_split

RULES = Rules()
register_rules(RULES)
rule_for = RULES.add
_HINT = "the rule 'replicate' for the layers that give this tensor, in paceline.Layout(rules={...})"
# functions that are meaningless for a tensor without memory
_REFUSED = frozenset(
    [
        *getters("grad", "_base", "_version"),
        *named_functions("data_ptr", "untyped_storage", "storage", "set_", "resize_", "stride"),
        *named_functions("register_hook", "retain_grad", "requires_grad_", "storage_offset"),
        *named_functions("register_post_accumulate_grad_hook", "share_memory_", "is_set_to"),
    ]
)


class Watch:
    """What a context may do with the functions of split tensors; this one does nothing."""

    def before(self, axis: TensorAxis, rule: Rule, func: Any, args: Any, kwargs: Any) -> None:
        """Called before a rule."""

    def gathers(self, axis: TensorAxis, func: Any, tensors: list["SplitTensor"]) -> None:
        """Called before a function that gets whole tensors."""


class _Watches(threading.local):
    """Those of a thread, the innermost one last."""

    def __init__(self) -> None:
        self.all: list[Watch] = [Watch()]


_watches = _Watches()


class watching:  # noqa: N801  a context manager
    """Let a ``Watch`` see each function of split tensors."""

    def __init__(self, watch: Watch) -> None:
        self._own = watch

    def __enter__(self) -> None:
        _watches.all.append(self._own)

    def __exit__(self, *_: Any) -> None:
        _watches.all.pop()


class SplitTensor(DividedTensor):
    """A tensor of which this rank holds a piece, ``local``.

    Attributes:
        division: The divided dim.
        axis: The ranks.
    """

    division: Split
    axis: TensorAxis
    rules = RULES
    gradient_hint = _HINT

    @classmethod
    def of(cls, local: torch.Tensor, split: Split, axis: TensorAxis) -> "SplitTensor":
        """Return the tensor of the ranks' pieces."""
        found = cls._of_shape(local, split.whole_shape(local.shape, axis.size))
        found.division, found.axis = split, axis
        return found

    def whole(self) -> torch.Tensor:
        return exchange.gathered(self.local, self.division, self.axis)

    def shared(self) -> torch.Tensor:
        """Return the whole tensor for operations with pieces of other ones. Collective.

        Its gradient is a sum over the ranks. Several operations get the same tensor.
        """
        if self.local.is_inference():  # it has no number of its changes in place
            return exchange.shared_whole(self.local, self.division, self.axis)
        known = self.__dict__.get("_shared_whole")
        now = (self.local._version, torch.is_grad_enabled())
        if known is None or known[0] != now:
            known = now, exchange.shared_whole(self.local, self.division, self.axis)
            self._shared_whole = known
        found: torch.Tensor = known[1]
        return found

    def piece_at(self, dim: int | None, split: Split) -> torch.Tensor:
        """Return the piece for a result that is divided like ``split``.

        Args:
            dim: The dim that meets the divided one; None: it has none, or of extent 1.
        """
        if dim is not None and self.division == Split(dim, split.blocks):
            return self.local
        return self.shared() if dim is None else scattered(self.whole(), split.at(dim), self.axis)

    @property
    def divided_dims(self) -> tuple[int]:
        return (self.division.dim,)

    def refusal(self, what: str) -> ValueError:
        return ValueError(
            f"{what} a tensor that is divided over the ranks of the tensor axis (shape "
            f"{tuple(self.shape)}, dim {self.division.dim}){place()}. HINT: {_HINT}"
        )

    @classmethod
    def without_rule(
        cls, func: Any, tensors: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in _REFUSED or changes_divided(func, args, kwargs):
            raise tensors[0].refusal(f"{function_name(func)} is not possible for")
        _watches.all[-1].gathers(tensors[0].axis, func, tensors)
        return func(*tree_map(as_whole, args), **tree_map(as_whole, kwargs))

    def before_rule(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> None:
        _watches.all[-1].before(self.axis, rule, func, args, kwargs)

    def placed(self, local: torch.Tensor, dims: Any) -> "SplitTensor":
        return SplitTensor.of(local, self.division.at(dims[self.division.dim]), self.axis)

    def in_shape(self, shape: tuple[int, ...], is_view: bool) -> Any:
        split = moved_split(tuple(self.shape), self.division, self.axis.size, shape)
        if split is None:
            return NO_RULE
        own = split.local_shape(shape, self.axis.size)
        return SplitTensor.of(
            self.local.view(own) if is_view else self.local.reshape(own), split, self.axis
        )

    def division_of(self, operands: list[torch.Tensor], shape: torch.Size) -> Split:
        return self.division.at(self.division.dim + len(shape) - self.dim())

    def aligned(self, operand: Any, shape: torch.Size, division: Split) -> Any:
        if not isinstance(operand, torch.Tensor):
            return operand
        dim = division.dim + operand.dim() - len(shape)
        meets = dim >= 0 and operand.shape[dim] == shape[division.dim]
        return piece_at(operand, dim if meets else None, division, self.axis)

    def divided_like(self, local: torch.Tensor, division: Split) -> "SplitTensor":
        return SplitTensor.of(local, division, self.axis)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        own = tuple(self.local.shape)
        return f"SplitTensor(shape={tuple(self.shape)}, dim={self.division.dim}, local={own})"


def piece_at(value: torch.Tensor, dim: int | None, split: Split, axis: TensorAxis) -> torch.Tensor:
    """Return an operand's piece for a result that is divided like ``split``.

    Args:
        dim: As for ``SplitTensor.piece_at``.
    """
    if isinstance(value, SplitTensor):
        return value.piece_at(dim, split)
    return shared(value, axis) if dim is None else scattered(value, split.at(dim), axis)


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims in the order of memory, the outermost first.

    A dim of extent 1 has the stride of the next outer dim, so it is inside of it.
    """
    shape, strides = tensor.shape, tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], shape[dim] == 1))


@rule_for(torch.autograd.grad, anywhere=True)
def no_gradient_of(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse gradients with respect to a split tensor: its whole is not in the graph."""
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs", ())
    found = next(divided_tensors(inputs), None)
    if found is not None:
        raise found.refusal("torch.autograd.grad is not possible for")
    return NO_RULE
