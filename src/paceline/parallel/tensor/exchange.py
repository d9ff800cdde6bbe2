"""Exchange between the ranks of the tensor axis, in forward and backward.

A plain tensor has the same value on all ranks of the axis, and so has its gradient. A split tensor
and its gradient are divided alike. These functions convert between them (Megatron-LM, arXiv
1909.08053 and 2205.05198, calls the first two f and g, the last two g and its conjugate of sequence
parallelism); each one is the backward of another one.

| function | forward | backward |
| --- | --- | --- |
| ``shared`` | nothing | all-reduce |
| ``total`` | all-reduce | nothing |
| ``gathered`` | all-gather | the rank's piece |
| ``scattered`` | the rank's piece | all-gather |
| ``shared_whole`` | all-gather | reduce-scatter |
| ``total_piece`` | reduce-scatter | all-gather |
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ...comm.group_device import all_gather_flat, reduce_scatter_flat
from ...record.hooks.block_labels import BlockLabels, labels_of_group
from ..divided.module_names import module_name
from .splits import Split


class TensorAxis:
    """The ranks along the tensor axis of a mesh.

    Attributes:
        group: Their process group.
        rank: The position of this rank.
        size: Number of ranks.
        token_dim: The dim along which sums of linear layers and embeddings are divided instead of
            being given to all ranks ("sequence"); None: they are not divided.
    """

    token_dim: int | None = None
    _labels: BlockLabels | None = None
    _layer: str | None = None  # that exchanges, if it is known

    def __init__(self, group: Any) -> None:
        self.group, self._labels = group, labels_of_group(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def layer(self) -> str:
        """The name of the module that exchanges, for records; "" without a record."""
        if self._labels is None:
            return ""
        return module_name() if self._layer is None else self._layer

    @contextmanager
    def exchange_of(self, layer: str) -> Iterator[None]:
        """Context of the exchange of a layer, in forward or backward."""
        before, self._layer = self._layer, layer
        try:
            yield
        finally:
            self._layer = before

    def _labelled(self) -> AbstractContextManager[None]:
        return nullcontext() if self._labels is None else self._labels.calls_of(self.layer)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        found = tensor.clone(memory_format=torch.contiguous_format)
        with self._labelled():
            dist.all_reduce(found, group=self.group)
        return found

    def sum_piece(self, tensor: torch.Tensor, split: Split) -> torch.Tensor:
        """Return this rank's piece of the sum over all ranks."""
        each = [split.cut(tensor, rank, self.size) for rank in range(self.size)]
        sent = torch.stack(each)
        found = sent.new_empty(sent.shape[1:])
        with self._labelled():
            reduce_scatter_flat(found.view(-1), sent.view(-1), group=self.group)
        return found

    def pieces(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        sent = local.contiguous()
        if sent.dtype is torch.bool:
            return [piece.bool() for piece in self.pieces(sent.to(torch.uint8))]
        found = sent.new_empty((self.size, sent.numel()))
        with self._labelled():
            all_gather_flat(found.view(-1), sent.view(-1), group=self.group)
        return [row.view(sent.shape) for row in found.unbind()]


# By name: the forward of an exchange, and the name of the exchange that is its backward.
_EXCHANGES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "shared": (lambda x, _, axis: x.view_as(x), "total"),
    "total": (lambda x, _, axis: axis.sum(x), "shared"),
    "gathered": (lambda x, split, axis: split.join(axis.pieces(x)), "scattered"),
    "scattered": (
        lambda x, split, axis: split.cut(x, axis.rank, axis.size).contiguous(),
        "gathered",
    ),
    "shared_whole": (lambda x, split, axis: split.join(axis.pieces(x)), "total_piece"),
    "total_piece": (lambda x, split, axis: axis.sum_piece(x, split), "shared_whole"),
}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, split: Split | None, axis: TensorAxis) -> Any:
        ctx.kind, ctx.split, ctx.axis, ctx.layer = name, split, axis, axis.layer
        with axis.exchange_of(ctx.layer):
            return _EXCHANGES[name][0](x, split, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with ctx.axis.exchange_of(ctx.layer):
            found = _exchanged(gradient, _EXCHANGES[ctx.kind][1], ctx.split, ctx.axis)
        return found, None, None, None


def _exchanged(x: torch.Tensor, name: str, split: Split | None, axis: TensorAxis) -> torch.Tensor:
    found: torch.Tensor = _Exchange.apply(x, name, split, axis)  # type: ignore[no-untyped-call]
    return found


def _records(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def shared(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """Return a tensor for operations with pieces; its gradient is summed over the ranks."""
    if not _records(x):
        return x
    known = getattr(x, "_paceline_shared", None)
    if known is not None and known[0] is axis and known[1] == x._version:
        found: torch.Tensor = known[2]
        return found  # one sum for all operations that use it
    found = _exchanged(x, "shared", None, axis)
    if not x.is_leaf:  # a leaf would be in a cycle with it
        x._paceline_shared = (axis, x._version, found)  # type: ignore[attr-defined]
    return found


def total(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """Return the sum of the ranks' tensors."""
    return _exchanged(x, "total", None, axis)


def gathered(x: torch.Tensor, split: Split, axis: TensorAxis) -> torch.Tensor:
    """Return the whole tensor of the ranks' pieces."""
    return _exchanged(x, "gathered", split, axis)


def scattered(x: torch.Tensor, split: Split, axis: TensorAxis) -> torch.Tensor:
    """Return this rank's piece of a tensor that all ranks have."""
    if not _records(x):
        return split.cut(x, axis.rank, axis.size)
    return _exchanged(x, "scattered", split, axis)


def shared_whole(x: torch.Tensor, split: Split, axis: TensorAxis) -> torch.Tensor:
    """Return the whole tensor for operations with pieces; its gradient is summed over the ranks."""
    return _exchanged(x, "shared_whole", split, axis)


def total_piece(x: torch.Tensor, split: Split, axis: TensorAxis) -> torch.Tensor:
    """Return this rank's piece of the sum of the ranks' tensors."""
    return _exchanged(x, "total_piece", split, axis)
