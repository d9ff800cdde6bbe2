"""Attention of ``torch.nn.MultiheadAttention`` from functions that have rules."""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from .divided_tensor import NO_RULE


def multi_head_attention(
    projecting: AbstractContextManager[Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Compute ``F.multi_head_attention_forward``; NO_RULE for its unusual arguments.

    Args:
        projecting: Context of the last projection.
        query, key, value: [length, batch, features].
    """
    unusual = (bias_k, bias_v, static_k, static_v)
    if use_separate_proj_weight or add_zero_attn or any(one is not None for one in unusual):
        return NO_RULE
    if query.dim() != 3 or in_proj_weight is None:
        return NO_RULE
    if is_causal and attn_mask is None:  # PyTorch's own error
        return NO_RULE
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    projected: list[Any] = []
    for x, w, b in zip((query, key, value), in_proj_weight.chunk(3), biases, strict=True):
        y = F.linear(x, w, b)  # [length, batch, heads * size]
        projected.append(y.reshape(y.shape[0], y.shape[1], num_heads, -1).permute(1, 2, 0, 3))
    mask = None
    if not (is_causal and key_padding_mask is None and not need_weights):
        mask = _added_mask(attn_mask, key_padding_mask, query)
    p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        out, weights = _with_weights(projected, mask, p)
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        causal = is_causal and mask is None
        q, k, v = projected
        out = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
    out = out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
    with projecting:
        return F.linear(out, out_proj_weight, out_proj_bias), weights


def _added_mask(
    mask: torch.Tensor | None, padding: torch.Tensor | None, query: torch.Tensor
) -> torch.Tensor | None:
    """Return the mask as numbers that are added: [batch, heads, length, key's length] or less."""
    found = None
    if mask is not None:
        found = _as_added(mask, query.dtype)
        found = found.unflatten(0, (query.shape[1], -1)) if found.dim() == 3 else found
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
