"""Products, convolutions and attention: sums over a dim that several operands have.

Each dim of an operand has a label. If the divided label is in the result, the result is divided;
otherwise each rank has a part of the sum.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ...divided import rules
from ...divided.divided_tensor import NO_RULE
from ...divided.rules import Labels, register_products
from ..exchange import TensorAxis, total, total_piece
from ..split_tensor import RULES, SplitTensor, piece_at, rule_for
from ..splits import Split


def contract(
    compute: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    labels: Sequence[Labels],
    result: Labels,
    fixed: Sequence[Hashable] = (),
    add: Callable[[torch.Tensor, TensorAxis], torch.Tensor] = total,
) -> Any:
    """Compute a sum of products of pieces.

    Args:
        labels: Of each operand, the labels of its dims.
        result: Those of the result.
        fixed: Labels that can't be divided.
        add: Adds the parts of ranks.
    """
    chosen = _chosen(operands, labels, fixed)
    if chosen is None:
        return NO_RULE
    label, split, axis, extent = chosen
    pieces = []
    for operand, own in zip(operands, labels, strict=True):
        dim = own.index(label) if label in own else None
        if dim is not None and operand.shape[dim] != extent:  # it is broadcast
            return NO_RULE
        is_plain = dim is not None and not isinstance(operand, SplitTensor)
        if is_plain and _is_costly(operand, operands):
            return NO_RULE
        pieces.append(piece_at(operand, dim, split, axis))
    found = compute(*pieces)
    if label in result:
        return SplitTensor.of(found, split.at(result.index(label)), axis)
    return add(found, axis)


def _chosen(
    operands: Sequence[torch.Tensor], labels: Sequence[Labels], fixed: Sequence[Hashable]
) -> tuple[Hashable, Split, TensorAxis, int] | None:
    """Return the label that is divided, and its extent.

    It is that of features, because a weight is not gathered, else that of the largest operand.
    """
    found: list[tuple[bool, int, Hashable, SplitTensor]] = []
    for operand, own in zip(operands, labels, strict=True):
        if isinstance(operand, SplitTensor):
            label = own[operand.division.dim]
            if label not in fixed:
                found.append((label in _FEATURES, operand.numel(), label, operand))
    if not found:
        return None
    _, _, label, operand = max(found, key=lambda key: key[:2])
    return label, operand.division, operand.axis, operand.shape[operand.division.dim]


def _is_costly(operand: torch.Tensor, operands: Sequence[torch.Tensor]) -> bool:
    """Return whether cutting an operand costs more than the whole of the split ones.

    The gradient of a parameter that is cut has to be gathered.
    """
    if not (operand.requires_grad and operand.is_leaf and torch.is_grad_enabled()):
        return False
    return operand.numel() > sum(t.numel() for t in operands if isinstance(t, SplitTensor))


@rule_for(F.linear, anywhere=True)
def linear(func: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:
    """Compute a linear layer by columns, by rows, or of a part of the batch."""
    if weight.dim() != 2:
        return NO_RULE
    batch = [("batch", i) for i in range(x.dim() - 1)]
    labels: list[Labels] = [(*batch, "in"), ("out", "in")]
    return _with_bias((x, weight), labels, (*batch, "out"), bias, F.linear, -1, summed)


def _with_bias(
    operands: tuple[torch.Tensor, torch.Tensor],
    labels: list[Labels],
    result: Labels,
    bias: Any,
    compute: Callable[..., torch.Tensor],
    dim: int,
    add: Callable[[torch.Tensor, TensorAxis], torch.Tensor] = total,
) -> Any:
    """Compute a product and add the bias: once, where ranks have parts of the sum."""
    if bias is None:
        return contract(compute, operands, labels, result, _FIXED, add)
    chosen = _chosen(operands, labels, _FIXED)
    if chosen is not None and chosen[0] not in result:
        found = contract(compute, operands, labels, result, _FIXED, add)
        if found is NO_RULE:
            return NO_RULE
        whole = bias.whole() if isinstance(bias, SplitTensor) else bias
        shape = [1] * found.dim()
        shape[dim] = -1
        return found + whole.view(shape)
    return contract(compute, (*operands, bias), [*labels, ("out",)], result, _FIXED)


_FEATURES = ("in", "out")
_FIXED = ("k0", "k1", "k2", "s0", "s1", "s2")


_TRANSPOSED = (
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
)


@rule_for(
    *(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d, *_TRANSPOSED),
    anywhere=True,
)
def convolution(
    func: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Compute a convolution with a part of its output or input channels."""
    is_transposed = func in _TRANSPOSED
    names = ["stride", "padding", "dilation", "groups"]
    if is_transposed:
        names = ["stride", "padding", "output_padding", "groups", "dilation"]
    given = dict(zip(names, args, strict=False)) | kwargs
    if x.dim() != weight.dim():
        return NO_RULE

    def compute(*pieces: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = func(*pieces, **given)
        return found

    if given.get("groups", 1) > 1:
        return NO_RULE if is_transposed else _grouped(compute, x, weight, bias, given)
    places = [f"s{i}" for i in range(weight.dim() - 2)]
    channels = ("in", "out") if is_transposed else ("out", "in")
    labels: list[Labels] = [
        ("batch", "in", *places),
        (*channels, *(f"k{i}" for i in range(weight.dim() - 2))),
    ]
    return _with_bias((x, weight), labels, ("batch", "out", *places), bias, compute, 1)


def _grouped(compute: Any, x: Any, weight: Any, bias: Any, given: dict[str, Any]) -> Any:
    """Compute the groups of this rank's channels."""
    if not isinstance(weight, SplitTensor) or weight.division != Split(0):
        return NO_RULE
    axis = weight.axis
    if given["groups"] % axis.size:
        return NO_RULE
    pieces = [piece_at(x, 1, Split(1), axis), weight.local]
    if bias is not None:
        pieces.append(piece_at(bias, 0, Split(0), axis))
    given["groups"] //= axis.size
    return SplitTensor.of(compute(*pieces), Split(1), axis)


register_products(RULES, contract)


@rule_for(F.embedding, anywhere=True)
def embedding(
    func: Any,
    index: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up rows: of this rank's part of the vocabulary, or this rank's columns."""
    padding = padding_idx
    is_plain = isinstance(weight, SplitTensor) and not isinstance(index, SplitTensor)
    if max_norm is not None:
        raise ValueError(
            "an embedding with max_norm changes its weight in forward, which a divided one does "
            "not support. HINT: the rule 'replicate' for it"
        )
    if not is_plain or scale_grad_by_freq or weight.division.blocks > 1:
        return NO_RULE
    if padding is not None and padding < 0:
        padding += weight.shape[0]
    if weight.division.dim == 1:
        found = F.embedding(index, weight.local, padding, sparse=sparse)
        return SplitTensor.of(found, Split(found.dim() - 1), weight.axis)
    on_host = index.device.type == "cpu"  # a GPU's kernel checks its own rows only
    if on_host and bool(((index < 0) | (index >= weight.shape[0])).any()):
        raise IndexError(f"an index of the embedding is outside of its {weight.shape[0]} rows")
    rows, rank = weight.local.shape[0], weight.axis.rank
    here = index - rank * rows
    is_own = (here >= 0) & (here < rows)
    own_padding = None
    if padding is not None and rank * rows <= padding < (rank + 1) * rows:
        own_padding = padding - rank * rows
    found = F.embedding(here.where(is_own, 0), weight.local, own_padding, sparse=sparse)
    return summed(found.where(is_own.unsqueeze(-1), 0), weight.axis)


def summed(parts: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """Return the sum of the ranks' tensors [batch, tokens, features].

    With a division of tokens (``TensorAxis.token_dim``), each rank gets the sum for its tokens.
    """
    dim = axis.token_dim
    if dim is None or parts.dim() != 3 or not Split(dim).divides(parts.shape[dim], axis.size):
        return total(parts, axis)
    return SplitTensor.of(total_piece(parts, Split(dim), axis), Split(dim), axis)


@rule_for(F.scaled_dot_product_attention, anywhere=True)
def scaled_dot_product_attention(
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute the attention of this rank's heads (or samples)."""
    if not isinstance(query, SplitTensor) or query.division.dim >= query.dim() - 2:
        return NO_RULE
    dims, extent = query.dim(), query.shape[query.division.dim]
    for t in (key, value):
        is_like = t.dim() == dims and t.shape[query.division.dim] == extent
        if not is_like and not enable_gqa:
            return NO_RULE
    if enable_gqa and not all(
        isinstance(t, SplitTensor) and t.division == query.division for t in (key, value)
    ):
        return NO_RULE
    if dropout_p > 0.0:  # the mask of dropout must be that of one process
        if enable_gqa or (is_causal and attn_mask is not None):  # the latter: PyTorch's error
            return NO_RULE
        return attention_with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale)
    split, axis = query.division, query.axis
    pieces = [piece_at(t, split.dim, split, axis) for t in (query, key, value)]
    if attn_mask is not None:
        dim = attn_mask.dim() + split.dim - query.dim()
        has_dim = dim >= 0 and attn_mask.shape[dim] == query.shape[split.dim]
        attn_mask = piece_at(attn_mask, dim if has_dim else None, split, axis)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    if enable_gqa:  # which older versions do not have
        options["enable_gqa"] = True
    return SplitTensor.of(func(*pieces, attn_mask=attn_mask, **options), split, axis)


def attention_with_dropout(
    query: Any, key: Any, value: Any, mask: Any, p: float, is_causal: bool, scale: float | None
) -> Any:
    """Compute attention by its definition, with dropout of the weights."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(scale)
    weights = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        rows, columns = weights.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        weights = weights.masked_fill(mask.logical_not(), float("-inf"))
    elif mask is not None:
        weights = weights + mask
    empty = (weights == float("-inf")).all(-1, keepdim=True)  # rows whose keys are all masked
    weights = weights.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return F.dropout(weights, p, True) @ value


@rule_for(F.multi_head_attention_forward, anywhere=True)
def multi_head_attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute nn.MultiheadAttention whose heads are divided over the ranks."""
    names = ("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight")
    given = dict(zip(names, args, strict=False)) | kwargs
    weight = given["in_proj_weight"]
    if not isinstance(weight, SplitTensor) or weight.division.blocks != 3:
        return NO_RULE
    if given["num_heads"] % weight.axis.size:
        return NO_RULE
    return rules.multi_head_attention(_tokens_along(weight.axis, given["query"]), *args, **kwargs)


@contextmanager
def _tokens_along(axis: TensorAxis, query: Any) -> Iterator[None]:
    """Divide tokens of a sum like those of the query, where sums are divided."""
    before = axis.token_dim
    if before is not None and isinstance(query, SplitTensor) and query.division.dim < 2:
        axis.token_dim = query.division.dim
    try:
        yield
    finally:
        axis.token_dim = before
