"""Fourier transforms and attention, which read all positions: gathered along the dims they mix."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from ...cost.layout_memory import size_text
from .layer_names import layer
from .pointwise import normal_dims
from .split_tensor import SplitTensor, handles

_OF_ONE_DIM = "fft ifft rfft irfft hfft ihfft"
_OF_TWO_DIMS = "fft2 ifft2 rfft2 irfft2"
_OF_ALL_DIMS = "fftn ifftn rfftn irfftn fftshift ifftshift"


def _functions(names: str) -> list[Any]:
    return [getattr(torch.fft, name) for name in names.split()]


def say_gathered(name: str, tensors: Iterable[SplitTensor]) -> None:
    """Print once for a layer what it gathers."""
    gathered = list(tensors)
    size = sum(one.numel() * one.element_size() for one in gathered)
    gathered[0].groups.say_once(
        f"{layer()}: {name}",
        f"reads all positions, so each rank gathers {size_text(size)} in each forward",
    )


@handles(*_functions(f"{_OF_ONE_DIM} {_OF_TWO_DIMS} {_OF_ALL_DIMS}"))
def fourier(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Transform; divided dims that are transformed are gathered, and the result is whole there."""
    name = func.__name__.removeprefix("fft_")
    dims = _transformed(name, values, args, options)
    mixed = [dim for dim in dims if dim in values.parts]
    if mixed:
        say_gathered(name, [values])
    found = values.whole(mixed) if mixed else values
    if not isinstance(found, SplitTensor):
        return func(found, *args, **options)
    return found.like(func(found.local, *args, **options))


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
    return tuple(range(values.dim())) if dim is None else normal_dims(dim, values.dim())


@handles(F.scaled_dot_product_attention, anywhere=True)
def attention(func: Any, *args: Any, **options: Any) -> Any:
    """Attention: each rank computes its queries with all keys and values.

    All is gathered where the result depends on the number of the query (a mask, causal attention,
    dropout), or where heads or samples are divided.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | options
    query = given["query"]
    depends = given.get("attn_mask") is not None or given.get("is_causal")
    is_along = isinstance(query, SplitTensor) and set(query.parts) == {query.dim() - 2}
    keeps = is_along and not depends and not given.get("dropout_p")
    if not keeps:
        return func(**_gathered(func.__name__, given))
    others = {name: one for name, one in given.items() if name != "query"}
    result = func(query.local, **_gathered(func.__name__, others))
    return query.like(result, {result.dim() - 2: query.parts[query.dim() - 2]})


@handles(F.multi_head_attention_forward, anywhere=True)
def heads(func: Any, *args: Any, **options: Any) -> Any:
    """Attention of torch.nn.MultiheadAttention: gathered."""
    found = _gathered("attention", dict(enumerate(args)) | options)
    return func(*[found.pop(number) for number in range(len(args))], **found)


def _gathered(name: str, given: dict[Any, Any]) -> dict[Any, Any]:
    """Return arguments with whole tensors; a tensor that is given twice is gathered once."""
    parts = {id(one): one for one in given.values() if isinstance(one, SplitTensor)}
    if parts:
        say_gathered(name, parts.values())
    whole = {key: one.whole() for key, one in parts.items()}
    return {key: whole.get(id(one), one) for key, one in given.items()}
