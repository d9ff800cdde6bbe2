"""Fourier transforms and attention, which read all positions: gathered along the dims they mix."""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from .layer_names import layer
from .pointwise import normal_dims
from .split_tensor import SplitTensor, handles

_OF_ONE_DIM = "fft ifft rfft irfft hfft ihfft"
_OF_TWO_DIMS = "fft2 ifft2 rfft2 irfft2"
_OF_ALL_DIMS = "fftn ifftn rfftn irfftn fftshift ifftshift"


def _functions(names: str) -> list[Any]:
    return [getattr(torch.fft, name) for name in names.split()]


def say_gathered(values: SplitTensor, name: str, reason: str) -> None:
    """Print once for a layer what it gathers."""
    groups = values.groups
    size = values.numel() * values.element_size() / 2**20
    own = layer()
    if (key := f"{own}: {name}") not in groups.warned:
        groups.warned.add(key)
        groups.say(f"{key} {reason}, so each rank gathers {size:,.1f} MiB in each forward")


@handles(*_functions(f"{_OF_ONE_DIM} {_OF_TWO_DIMS} {_OF_ALL_DIMS}"))
def fourier(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Transform; divided dims that are transformed are gathered, and the result is whole there."""
    name = func.__name__.removeprefix("fft_")
    dims = _transformed(name, values, args, options)
    mixed = [dim for dim in dims if dim in values.parts]
    if mixed:
        say_gathered(values, name, "reads all positions")
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
    tensors = [one for one in given.values() if isinstance(one, SplitTensor)]
    say_gathered(max(tensors, key=torch.numel), func.__name__, "reads all positions")
    query = given["query"]
    depends = given.get("attn_mask") is not None or given.get("is_causal")
    is_along = isinstance(query, SplitTensor) and set(query.parts) == {query.dim() - 2}
    keeps = is_along and not depends and not given.get("dropout_p")
    found = {
        name: one.whole()
        if isinstance(one, SplitTensor) and (name != "query" or not keeps)
        else one
        for name, one in given.items()
    }
    if not keeps:
        return func(**found)
    result = func(**(found | {"query": query.local}))
    return query.like(result, {result.dim() - 2: query.parts[query.dim() - 2]})


@handles(F.multi_head_attention_forward, anywhere=True)
def heads(func: Any, *args: Any, **options: Any) -> Any:
    """Attention of torch.nn.MultiheadAttention: gathered."""
    values = [*args, *options.values()]
    tensors = [one for one in values if isinstance(one, SplitTensor)]
    say_gathered(max(tensors, key=torch.numel), "attention", "reads all positions")

    def whole(one: Any) -> Any:
        return one.whole() if isinstance(one, SplitTensor) else one

    return func(*map(whole, args), **{name: whole(one) for name, one in options.items()})
