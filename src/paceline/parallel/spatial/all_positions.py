"""Fourier transforms and attention, which read all positions.

A transform is computed with the tensor divided along another dim (channels, samples), attention
with the heads divided: the ranks exchange blocks before and after it. Where no such dim can be
divided, the tensors are gathered.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from ..divided.attention import multi_head_attention
from ..divided.divided_tensor import NO_RULE
from .layers import own_random_numbers
from .split_tensor import SplitTensor, rule_for, say_gathered

_OF_ONE_DIM = "fft ifft rfft irfft hfft ihfft"
_OF_TWO_DIMS = "fft2 ifft2 rfft2 irfft2"
_OF_ALL_DIMS = "fftn ifftn rfftn irfftn fftshift ifftshift"
_TO_POSITIONS = frozenset(["ifft", "irfft", "hfft", "ifft2", "irfft2", "ifftn", "irfftn"])


def _functions(names: str) -> list[Any]:
    return [getattr(torch.fft, name) for name in names.split()]


@rule_for(*_functions(f"{_OF_ONE_DIM} {_OF_TWO_DIMS} {_OF_ALL_DIMS}"))
def fourier(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Transform dims that are whole: divided ones among them are exchanged with another dim.

    Spectra remain divided along that dim; the results of inverse transforms along positions.
    """
    name = func.__name__.removeprefix("fft_")
    dims = _transformed(name, values, args, options)
    found: Any = values
    for dim, partition in values.parts.items():
        if dim not in dims:
            continue
        # channels, samples, then other positions
        others = [1, 0, *range(2, values.dim())]
        free = [
            one for one in others
            if one < values.dim() and one not in dims and one not in found.parts
            and values.size(one) >= partition.ranks
        ]  # fmt: skip
        if free:
            found = found.redivided(dim, free[0])
        else:
            say_gathered(name, [values])
            found = found.whole([dim])
    if not isinstance(found, SplitTensor):
        return func(found, *args, **options)
    result = found.like(func(found.local, *args, **options))
    return result.at_home() if name in _TO_POSITIONS and result.is_free else result


def _transformed(
    name: str, values: SplitTensor, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[int, ...]:
    """Return the dims of a transform."""
    is_shift = name.endswith("shift")
    given = dict(zip(("dim",) if is_shift else ("s", "dim", "norm"), args, strict=False)) | options
    dim, sizes = given.get("dim"), given.get("s")
    if dim is None and name in _OF_ONE_DIM.split():
        dim = -1
    if dim is None and name in _OF_TWO_DIMS.split():
        dim = (-2, -1)
    if dim is None and sizes is not None:
        dim = tuple(range(-len(sizes), 0))
    if dim is None:
        return tuple(range(values.dim()))
    return tuple(one % values.dim() for one in ((dim,) if isinstance(dim, int) else dim))


@rule_for(F.scaled_dot_product_attention, anywhere=True)
def attention(
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Attention: each rank computes some heads, or its queries with all keys and values.

    All is gathered where samples or features are divided.
    """
    given: tuple[Any, ...] = (query, key, value)
    split = next(one for one in (*given, attn_mask) if isinstance(one, SplitTensor))
    rows = query.dim() - 2
    is_along = isinstance(query, SplitTensor) and set(query.parts) == {rows}
    has_both = is_causal and attn_mask is not None  # PyTorch's own error
    # the numbers of dropout are compared with those of one process
    if not is_along or (dropout_p and split.groups.is_compared) or has_both:
        tensors = _gathered("attention", {"q": query, "k": key, "v": value, "m": attn_mask})
        return func(*tensors.values(), dropout_p, is_causal, **options)
    assert isinstance(query, SplitTensor)
    options["dropout_p"] = dropout_p
    with own_random_numbers(query) if dropout_p else nullcontext():
        has_groups = bool(options.get("enable_gqa"))
        if all(_has_heads(one, query, has_groups) for one in given):
            parts = [one.redivided(rows, rows - 1) for one in given]
            heads = parts[0].parts
            if attn_mask is not None:
                shape = torch.Size((*query.shape[:-1], key.size(-2)))
                attn_mask = query.aligned(attn_mask, shape, heads)
            local = func(*(one.local for one in parts), attn_mask, is_causal=is_causal, **options)
            result = SplitTensor(local, heads, query.groups)
            own = {rows: query.parts[rows]}
            local = result.redivided(rows - 1, rows, own[rows]).local
        else:
            if is_causal:
                size = (query.size(-2), key.size(-2))
                attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
            own = {rows: query.parts[rows]}
            if attn_mask is not None:
                shape = torch.Size((*query.shape[:-1], key.size(-2)))
                attn_mask = query.aligned(attn_mask, shape, own)
            whole = _gathered("attention", {"k": key, "v": value})
            local = func(query.local, *whole.values(), attn_mask, **options)
    return query.like(local, own)


def _has_heads(tensor: Any, query: SplitTensor, has_groups: bool) -> bool:
    """Return whether heads [..., heads, rows, features] of a tensor can be divided."""
    rows, heads = tensor.dim() - 2, tensor.dim() - 3
    if not isinstance(tensor, SplitTensor) or tensor.dim() != query.dim() or heads < 0:
        return False
    if tensor.parts.keys() != {rows} or tensor.parts[rows].axis != query.parts[rows].axis:
        return False
    if tensor.size(heads) != query.size(heads) and not has_groups:
        return False
    return bool(tensor.size(heads) % tensor.parts[rows].ranks == 0)


@rule_for(F.multi_head_attention_forward, anywhere=True)
def heads(func: Any, *args: Any, **options: Any) -> Any:
    """Attention of torch.nn.MultiheadAttention [length, batch, features]."""
    query = args[0] if args else options["query"]
    if isinstance(query, SplitTensor) and query.dim() == 3 and query.parts.keys() == {0}:
        found = multi_head_attention(nullcontext(), *args, **options)
        if found is not NO_RULE:
            return found
    whole = _gathered("attention", dict(enumerate(args)) | options)
    return func(*[whole.pop(number) for number in range(len(args))], **whole)


def _gathered(name: str, given: dict[Any, Any]) -> dict[Any, Any]:
    """Return arguments with whole tensors; a tensor that is given twice is gathered once."""
    parts = {id(one): one for one in given.values() if isinstance(one, SplitTensor)}
    if parts:
        say_gathered(name, parts.values())
    whole = {key: one.whole() for key, one in parts.items()}
    return {key: whole.get(id(one), one) for key, one in given.items()}
