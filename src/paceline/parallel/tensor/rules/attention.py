"""Attention: each rank computes its heads."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ..exchange import TensorAxis
from ..split_tensor import NO_RULE, SplitTensor, rule_for
from .alignment import piece_at


@rule_for(F.scaled_dot_product_attention)
def scaled_dot_product_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute the attention of this rank's heads (or samples)."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given[name] for name in names[:3])
    mask, p = given.get("attn_mask"), given.get("dropout_p", 0.0)
    if not isinstance(query, SplitTensor) or query.division.dim >= query.dim() - 2:
        return NO_RULE
    dims, extent = query.dim(), query.shape[query.division.dim]
    for one in (key, value):
        is_like = one.dim() == dims and one.shape[query.division.dim] == extent
        if not is_like and not given.get("enable_gqa"):
            return NO_RULE
    if given.get("enable_gqa") and not (
        isinstance(key, SplitTensor) and key.division == query.division == value.division
    ):
        return NO_RULE
    if p > 0.0:  # the mask of dropout must be that of one process
        if given.get("enable_gqa"):
            return NO_RULE
        return attention_with_dropout(query, key, value, given)
    split, axis = query.division, query.axis
    pieces = [piece_at(one, split.dim, split, axis) for one in (query, key, value)]
    if mask is not None:
        dim = mask.dim() + split.dim - query.dim()
        has_dim = dim >= 0 and mask.shape[dim] == query.shape[split.dim]
        given["attn_mask"] = piece_at(mask, dim if has_dim else None, split, axis)
    options = {name: given[name] for name in names[3:] if name in given}
    return SplitTensor.of(func(*pieces, **options), split, axis)


def attention_with_dropout(query: Any, key: Any, value: Any, given: dict[str, Any]) -> Any:
    """Compute attention by its definition, with dropout of the weights."""
    scale = given.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(scale)
    weights = (query * root) @ (key * root).transpose(-2, -1)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        rows, columns = weights.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        weights = weights.masked_fill(mask.logical_not(), float("-inf"))
    elif mask is not None:
        weights = weights + mask
    empty = (weights == float("-inf")).all(-1, keepdim=True)  # rows whose keys are all masked
    weights = weights.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return F.dropout(weights, given["dropout_p"], True) @ value


@rule_for(F.multi_head_attention_forward)
def multi_head_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute nn.MultiheadAttention whose heads are divided over the ranks."""
    names = (
        *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight"),
        *("in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight"),
        *("out_proj_bias", "training", "key_padding_mask", "need_weights", "attn_mask"),
        *("use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
        *("static_k", "static_v", "average_attn_weights", "is_causal"),
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given[name] for name in names[:3])
    weight = given["in_proj_weight"]
    unusual = ("bias_k", "bias_v", "static_k", "static_v", "use_separate_proj_weight")
    if not isinstance(weight, SplitTensor) or weight.division.blocks != 3 or query.dim() != 3:
        return NO_RULE
    if given.get("add_zero_attn") or any(given.get(name) for name in unusual if name[:4] == "use_"):
        return NO_RULE
    if any(given.get(name) is not None for name in unusual[:4]):
        return NO_RULE
    heads = given["num_heads"]
    if heads % weight.axis.size:
        return NO_RULE
    biases = given.get("in_proj_bias")
    projected: list[Any] = []
    parts = (None,) * 3 if biases is None else biases.chunk(3)
    for x, w, b in zip((query, key, value), weight.chunk(3), parts, strict=True):
        y = F.linear(x, w, b)  # [length, batch, heads * size]
        y = y.reshape(y.shape[0], y.shape[1], heads, -1).permute(1, 2, 0, 3)
        projected.append(y)
    mask = _attention_mask(given, projected[0], projected[1])
    p = given["dropout_p"] if given.get("training", True) else 0.0
    if given.get("need_weights", True):
        out, weights = _with_weights(projected, mask, p)
        weights = weights.mean(1) if given.get("average_attn_weights", True) else weights
    else:
        causal = bool(given.get("is_causal")) and mask is None
        q, k, v = projected
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal)
        weights = None
    length, batch = query.shape[:2]
    out = out.permute(2, 0, 1, 3).reshape(length, batch, -1)
    with _tokens_along(weight.axis, query):
        found = F.linear(out, given["out_proj_weight"], given.get("out_proj_bias"))
    return found, weights


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


def _attention_mask(given: dict[str, Any], query: Any, key: Any) -> torch.Tensor | None:
    """Return the mask as numbers that are added: [batch, heads, length, key's length] or less."""
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if given.get("is_causal") and padding is None and not given.get("need_weights", True):
        return None
    found = None
    if mask is not None:
        found = _as_added(mask, query.dtype)
        found = found.unflatten(0, (query.shape[0], -1)) if found.dim() == 3 else found
    if padding is not None:
        added = _as_added(padding, query.dtype)[:, None, None, :]
        found = added if found is None else found + added
    return found


def _as_added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _with_weights(projected: list[Any], mask: Any, p: float) -> tuple[Any, Any]:
    query, key, value = projected
    weights = (query * math.sqrt(1.0 / query.shape[-1])) @ key.transpose(-2, -1)
    weights = (weights if mask is None else weights + mask).softmax(-1)
    weights = F.dropout(weights, p, p > 0.0)
    return weights @ value, weights
