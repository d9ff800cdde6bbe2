"""Attention: each rank computes its heads."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ...divided import attention
from ...divided.divided_tensor import NO_RULE
from ..exchange import TensorAxis
from ..split_tensor import SplitTensor, piece_at, rule_for


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
    for one in (key, value):
        is_like = one.dim() == dims and one.shape[query.division.dim] == extent
        if not is_like and not enable_gqa:
            return NO_RULE
    if enable_gqa and not all(
        isinstance(one, SplitTensor) and one.division == query.division for one in (key, value)
    ):
        return NO_RULE
    if dropout_p > 0.0:  # the mask of dropout must be that of one process
        if enable_gqa or (is_causal and attn_mask is not None):  # the latter: PyTorch's error
            return NO_RULE
        return attention_with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale)
    split, axis = query.division, query.axis
    pieces = [piece_at(one, split.dim, split, axis) for one in (query, key, value)]
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
    return attention.multi_head_attention(
        _tokens_along(weight.axis, given["query"]), *args, **kwargs
    )


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
