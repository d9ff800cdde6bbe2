"""Functions that compute each position by itself, or along dims that are not divided."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from .partition import Partition
from .split_tensor import SplitTensor, first_split, handles, part_of, refused

_UNARY = """abs absolute acos acosh angle asin asinh atan atanh bitwise_not ceil clone
contiguous cos cosh deg2rad detach erf erfc exp exp2 expm1 floor frac isfinite isinf isnan
lgamma log log10 log1p log2 logical_not logit nan_to_num neg negative positive rad2deg
real imag conj conj_physical resolve_conj reciprocal relu round rsqrt sigmoid sign sin sinc sinh
sqrt square tan tanh trunc digamma"""
_BINARY = """add sub subtract mul multiply div divide true_divide floor_divide remainder fmod
pow maximum minimum fmax fmin eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and
bitwise_or bitwise_xor atan2 where lerp addcmul addcdiv clamp clip masked_fill xlogy hypot
copysign isclose"""
_METHODS = """__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__
__truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __floordiv__ __mod__ __pow__ __rpow__
__neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__
__invert__ float double half bfloat16 int long bool cpu cuda requires_grad_"""
_LIKE = "zeros_like ones_like empty_like full_like"
_ACTIVATIONS = """relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid
hardtanh softplus softsign tanh tanhshrink hardshrink softshrink sigmoid logsigmoid threshold"""
# Their dim is an argument; they mix positions along it only.
_ALONG = """softmax log_softmax cumsum cumprod flip roll sort argsort logsumexp glu norm
argmax argmin amax amin any all max min sum mean var std prod topk median normalize diff"""
_REDUCING = (
    """logsumexp norm argmax argmin amax amin any all max min sum mean var std prod median"""
)


def functions(names: str, *homes: Any) -> list[Any]:
    """Return what PyTorch has of these names, also those that change their input (``add_``)."""
    found = []
    for name in names.split():
        for home in homes:
            candidates = (name, f"{name}_") if home is not F else (name,)
            found += [getattr(home, one) for one in candidates if hasattr(home, one)]
    return found


@handles(
    *functions(f"{_UNARY} {_BINARY}", torch, torch.Tensor),
    *(getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)),
    *functions(_LIKE, torch),
    *functions(_ACTIVATIONS, F, torch._C._nn),
    F.prelu,
    torch.prelu,
    torch.Tensor.copy_,
    torch.Tensor.fill_,
    torch.Tensor.zero_,
    torch.leaky_relu_ if hasattr(torch, "leaky_relu_") else torch.relu_,
    anywhere=True,
)
def pointwise(func: Any, *args: Any, **options: Any) -> Any:
    """Compute each position from the same position of all arguments, which broadcast."""
    if options.get("out") is not None:
        raise refused("out=... is not supported for a tensor", "use the result instead")
    name = getattr(func, "__name__", "")
    if name == "prelu":
        return _prelu(func, *args, **options)
    tensors = [one for one in (*args, *options.values()) if isinstance(one, torch.Tensor)]
    first = first_split(tensors)
    assert first is not None
    shape = torch.broadcast_shapes(*(one.shape for one in tensors))
    parts = merged_parts(tensors, shape)
    given = [aligned(one, shape, parts, first) for one in args]
    named = {key: aligned(one, shape, parts, first) for key, one in options.items()}
    result = func(*given, **named)
    if isinstance(result, str):  # Tensor.type()
        return result
    if not isinstance(result, torch.Tensor):
        raise refused(f"{name} of a tensor", ".whole() first")
    for before, after in zip((*args, *options.values()), (*given, *named.values()), strict=True):
        if result is after and isinstance(before, torch.Tensor):
            if not isinstance(before, SplitTensor):
                raise refused(
                    f"{name} would change a whole tensor by parts of another", "x = x + y"
                )
            if after is not before.local:
                raise refused(f"{name} would change a tensor with other borders", "x = x + y")
            return before
    return first.like(result, parts)


@handles(torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as, anywhere=True)
def cast(func: Any, values: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Change the dtype or device, also to those of another tensor."""
    given = [one.local if isinstance(one, SplitTensor) else one for one in args]
    named = {k: one.local if isinstance(one, SplitTensor) else one for k, one in options.items()}
    if not isinstance(values, SplitTensor):
        return func(values, *given, **named)
    result = func(values.local, *given, **named)
    return values.like(result) if isinstance(result, torch.Tensor) else result


def merged_parts(tensors: list[torch.Tensor], shape: torch.Size) -> dict[int, Partition]:
    """Return the partitions of the dims of a broadcast result."""
    parts: dict[int, Partition] = {}
    for one in tensors:
        if isinstance(one, SplitTensor):
            shift = len(shape) - one.dim()
            for dim, partition in one.parts.items():
                used = {part.axis for at, part in parts.items() if at != dim + shift}
                if partition.rows == shape[dim + shift] and partition.axis not in used:
                    parts.setdefault(dim + shift, partition)
    return parts


def aligned(
    value: Any, shape: torch.Size, parts: Mapping[int, Partition], first: SplitTensor
) -> Any:
    """Return the rows of an operand that this rank computes with, as a plain tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    shift = len(shape) - value.dim()
    own = {dim - shift: one for dim, one in parts.items() if dim >= shift}
    own = {dim: one for dim, one in own.items() if value.size(dim) == one.rows}
    if not isinstance(value, SplitTensor):
        return part_of(value, own, first.groups)
    # an axis divides one dim only: of x + x.transpose(2, 3) the second one is gathered
    other = [dim for dim, one in value.parts.items() if dim not in own or own[dim].axis != one.axis]
    found = value.whole(other) if other else value
    if not isinstance(found, SplitTensor):
        return part_of(found, own, first.groups)
    kept = {dim: own[dim] for dim in found.parts}
    if kept != found.parts:
        found = found.moved(kept)
    rest = {dim: one for dim, one in own.items() if dim not in kept}
    return part_of(found.local, rest, first.groups)


def _prelu(func: Any, values: SplitTensor, weight: Any) -> Any:
    if isinstance(weight, SplitTensor) or 1 in values.parts:
        raise refused("prelu needs whole channels of a tensor", ".whole() first")
    return values.like(func(values.local, weight))


def normal_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """Return the dims of an argument ``dim`` as numbers from 0."""
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(one % ndim for one in given)


def parts_after_reduction(
    values: SplitTensor, dims: tuple[int, ...], keepdim: bool
) -> dict[int, Partition]:
    """Return the partitions of what is left after reducing dims that are not divided."""
    left = {dim: one for dim, one in values.parts.items() if dim not in dims}
    if keepdim:
        return left
    return {dim - sum(one < dim for one in dims): part for dim, part in left.items()}


def along(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Compute along dims that are not divided; refuse others."""
    name = getattr(func, "__name__", "")
    dim = along_dim(func, args, options)
    if dim is None:
        raise refused(f"{name} over all positions of a tensor", ".whole() first, or give dim")
    dims = normal_dims(dim, values.dim())
    if any(one in values.parts for one in dims):
        axis = next(values.parts[one].axis for one in dims if one in values.parts)
        raise refused(
            f"{name} along a dim that is divided along the {axis} of a tensor", ".whole()"
        )
    result = func(values.local, *args, **options)
    parts: Mapping[int, Partition] = values.parts
    if name in _REDUCING.split():
        parts = parts_after_reduction(values, dims, keepdim_of(func, args, options))
    if isinstance(result, torch.Tensor):
        return values.like(result, parts)
    return type(result)(values.like(one, parts) for one in result)


def along_dim(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the argument ``dim`` of a function; None without one."""
    name = getattr(func, "__name__", "")
    for key in ("dim", "axis", "dims"):
        if key in options:
            return options[key]
    if name == "flip" and args and isinstance(args[0], int):
        return args
    place = {"roll": 1, "norm": 1, "normalize": 1, "diff": 1, "topk": 1}.get(name, 0)
    if len(args) > place and isinstance(args[place], (int, tuple, list)):
        return args[place]
    if name in ("glu", "sort", "argsort", "diff", "topk"):
        return -1
    return 1 if name == "normalize" else None


def keepdim_of(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Return the argument ``keepdim`` of a reduction."""
    if "keepdim" in options:
        return bool(options["keepdim"])
    if "keepdims" in options:
        return bool(options["keepdims"])
    booleans = [one for one in args if isinstance(one, bool)]
    return bool(booleans and booleans[-1])


handles(*functions(_ALONG, torch, torch.Tensor, F))(along)


# what is asked about a tensor

_META = """shape dtype device ndim is_cuda is_meta layout itemsize is_sparse is_quantized
is_nested is_mkldnn is_mps is_cpu names is_xla is_xpu"""


def _meta(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    return func(values, *args, **options)


def _of_local(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    return func(values.local, *args, **options)


def _of_part(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    return values.like(func(values.local, *args, **options))


def _register_attributes() -> None:
    T = torch.Tensor  # noqa: N806 - a class
    parts: list[Any] = [getattr(T, one).__get__ for one in ("real", "imag")]
    handles(*parts)(_of_part)
    meta: list[Any] = [getattr(T, one).__get__ for one in _META.split() if hasattr(T, one)]
    meta += [T.size, T.dim, T.ndimension, T.numel, T.nelement, T.__len__, T.is_floating_point]
    meta += [T.is_complex, T.element_size, T.__hash__, torch.is_floating_point, torch.is_complex]
    meta += [torch.numel, T.is_same_size, T.get_device, torch.is_tensor]
    handles(*meta)(_meta)
    local: list[Any] = [T.is_contiguous, T.is_inference]
    local += [getattr(T, one).__get__ for one in ("requires_grad", "grad_fn", "is_leaf")]
    handles(*local)(_of_local)


_register_attributes()
