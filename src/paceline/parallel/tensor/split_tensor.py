"""A tensor of which each rank of the tensor axis holds a piece, for code that knows nothing of it.

Shape, dtype and device are those of the whole tensor. A function of torch that has a rule
(``rules/``) computes with the pieces; any other one gets the whole tensors, which takes longer and
has the same result. Functions that change a tensor in place and have no rule are an error.

Autograd sees the pieces only: ``SplitTensor`` itself has no memory.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from . import exchange
from .exchange import TensorAxis
from .names import place
from .splits import Split

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
NO_RULE = object()  # a rule returns it where pieces are not enough
RULES: dict[Any, Rule] = {}
REFUSED: set[Any] = set()  # functions that are meaningless for a tensor without memory
NEUTRAL: set[Any] = set()  # functions of shape and dtype only
OF_PIECES: set[Any] = set()  # functions with the same result for a tensor and its pieces


class Watch:
    """What a context may do with the functions of split tensors; this one does nothing."""

    def before(self, axis: TensorAxis, rule: Rule, func: Any, args: Any, kwargs: Any) -> None:
        """Called before a rule."""

    def gathers(self, axis: TensorAxis, func: Any, tensors: list["SplitTensor"]) -> None:
        """Called before a function that gets whole tensors."""


class _Watches(threading.local):
    """Those of a thread, the innermost one last."""

    def __init__(self) -> None:
        self.all: list[Watch] = []


_watches = _Watches()


class watching:  # noqa: N801  a context manager
    """Let a ``Watch`` see each function of split tensors."""

    def __init__(self, watch: Watch) -> None:
        self._own = watch

    def __enter__(self) -> None:
        _watches.all.append(self._own)

    def __exit__(self, *_: Any) -> None:
        _watches.all.pop()


class SplitTensor(torch.Tensor):
    """A tensor of which this rank holds a piece.

    Attributes:
        local: The piece.
        division: The divided dim.
        axis: The ranks.
    """

    local: torch.Tensor
    division: Split
    axis: TensorAxis

    @staticmethod
    def of(local: torch.Tensor, split: Split, axis: TensorAxis) -> "SplitTensor":
        """Return the tensor of the ranks' pieces."""
        shape = split.whole_shape(local.shape, axis.size)
        with torch.no_grad():
            whole = torch.empty(shape, dtype=local.dtype, device="meta")
        if local.requires_grad and local.dtype.is_floating_point:
            # PyTorch then refuses the gradient of a function that gets past __torch_function__
            whole.requires_grad_()
        found = whole.as_subclass(SplitTensor)
        found.local, found.division, found.axis = local, split, axis
        return found

    def whole(self) -> torch.Tensor:
        """Return the whole tensor. Collective."""
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

    @classmethod
    def _plainly(cls, *call: Any) -> Any:
        """Call a function as PyTorch does without rules."""
        return super().__torch_function__(*call)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NEUTRAL:
            return cls._plainly(func, types, args, kwargs)
        if func in OF_PIECES:
            return _of_piece(func, args, kwargs)
        tensors = list(split_tensors(args, kwargs))
        if not tensors:
            return cls._plainly(func, types, args, kwargs)
        axis = tensors[0].axis
        for tensor in tensors:
            _check_graph(tensor, func)
        rule = RULES.get(func)
        if rule is not None:
            args, kwargs = _usual_form(args, kwargs)
            if _watches.all:
                _watches.all[-1].before(axis, rule, func, args, kwargs)
            found = rule(func, args, kwargs)
            if found is not NO_RULE:
                return found
        if func in REFUSED or _changes_split(func, args, kwargs):
            raise ValueError(refusal(func, tensors[0]))
        if _watches.all:
            _watches.all[-1].gathers(axis, func, tensors)
        return func(*tree_map(as_whole, args), **tree_map(as_whole, kwargs))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        own = tuple(self.local.shape)
        return f"SplitTensor(shape={tuple(self.shape)}, dim={self.division.dim}, local={own})"


def split_tensors(args: Any, kwargs: Any) -> Iterator[SplitTensor]:
    """Yield the split tensors among arguments, also in lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, SplitTensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            for one in tree_flatten(value)[0]:
                if isinstance(one, SplitTensor):
                    yield one


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims in the order of memory, the outermost first.

    A dim of extent 1 has the stride of the next outer dim, so it is inside of it.
    """
    shape, strides = tensor.shape, tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], shape[dim] == 1))


def as_whole(value: Any) -> Any:
    """Return the whole tensor of a split one; another value as it is."""
    return value.whole() if isinstance(value, SplitTensor) else value


def whole_outputs(outputs: Any) -> Any:
    """Return a nest of outputs with whole tensors. Collective where it has split ones."""
    if isinstance(outputs, torch.Tensor):
        return as_whole(outputs)
    if isinstance(outputs, Mapping):
        found = {name: whole_outputs(one) for name, one in outputs.items()}
        is_same = all(found[name] is one for name, one in outputs.items())
        return outputs if is_same else type(outputs)(found)  # type: ignore[call-arg]
    if isinstance(outputs, (list, tuple)):
        each = [whole_outputs(one) for one in outputs]
        if all(a is b for a, b in zip(each, outputs, strict=True)):
            return outputs
        return type(outputs)(*each) if hasattr(outputs, "_fields") else type(outputs)(each)
    return outputs


def function_name(func: Any) -> str:
    """Return the name of a function for messages, such as "F.conv2d" or "Tensor.add_"."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        owner = getattr(func, "__self__", None)
        return f"Tensor.{getattr(owner, '__name__', '?')}"
    module = getattr(func, "__module__", None) or ""
    if module.startswith("torch.nn.functional") or module == "torch._C._nn":
        return f"F.{name}"
    kind = getattr(getattr(func, "__objclass__", None), "__name__", "")
    return f"Tensor.{name}" if kind in ("TensorBase", "Tensor", "_TensorBase") else f"torch.{name}"


def refusal(func: Any, tensor: SplitTensor) -> str:
    """Return the message for a function that pieces do not allow."""
    return (
        f"{function_name(func)} of a tensor that is divided over the ranks of the tensor axis "
        f"(shape {tuple(tensor.shape)}, dim {tensor.division.dim}) is not possible{place()}. HINT: "
        "the rule 'replicate' for the layers that give this tensor, in "
        "paceline.Layout(rules={...})"
    )


def _usual_form(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return arguments with PyTorch's names in place of NumPy's, and the input as the first one."""
    kwargs = {_NAMES_OF_NUMPY.get(name, name): value for name, value in kwargs.items()}
    if not args and "input" in kwargs and "condition" not in kwargs:
        args = (kwargs.pop("input"),)
    return args, kwargs


_NAMES_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


def _of_piece(func: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.Tensor.__repr__:
        return SplitTensor.__repr__(args[0])
    return func(*(one.local if isinstance(one, SplitTensor) else one for one in args), **kwargs)


def _check_graph(tensor: SplitTensor, func: Any) -> None:
    """Raise ValueError for a tensor that an autograd function of the script has returned.

    PyTorch has noted the function's backward for a tensor without memory, which is not in the graph
    of the piece.
    """
    if tensor.local.requires_grad or not torch.is_grad_enabled():
        return
    with torch._C.DisableTorchFunctionSubclass():
        is_lost = tensor.requires_grad
    if is_lost:
        raise ValueError(
            refusal(func, tensor).replace(
                "is not possible",
                "follows a torch.autograd.Function of the script, which can't divide its backward",
            )
        )


def _changes_split(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function changes a split tensor in place."""
    name = getattr(func, "__name__", "")
    if any(isinstance(one, SplitTensor) for one in tree_flatten(kwargs.get("out"))[0]):
        return True
    is_magic = name.startswith("__") and name.endswith("__")
    in_place = (name.endswith("_") and not is_magic) or name in _IN_PLACE or name == "__set__"
    if kwargs.get("inplace") is True:
        in_place = True
    return in_place and next(split_tensors(args[:1], {}), None) is not None


_IN_PLACE = (
    {
        f"__i{name}__"
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    }
    | {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}
    | {"__setitem__"}
)


def rule_for(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for functions of torch."""

    def register(rule: Rule) -> Rule:
        for function in functions:
            if function is not None:
                RULES[function] = rule
        return rule

    return register


def named_functions(*names: str) -> list[Any]:
    """Return the functions of these names in torch, torch.Tensor and torch.nn.functional."""
    places = (torch, torch.Tensor, nn.functional)
    return [getattr(place, name) for name in names for place in places if hasattr(place, name)]


def _getters(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)]


NEUTRAL.update(
    [
        *_getters("shape", "dtype", "ndim", "layout", "is_sparse", "is_quantized", "is_nested"),
        *_getters("is_mkldnn", "itemsize"),
        *named_functions("size", "dim", "ndimension", "numel", "nelement", "is_floating_point"),
        *named_functions("is_complex", "__len__", "is_inference", "is_neg", "is_conj"),
        *named_functions("is_tensor", "is_same_size"),
        torch.Tensor.__hash__,
    ]
)
REFUSED.update(
    [
        *_getters("grad", "_base", "_version"),
        *named_functions("data_ptr", "untyped_storage", "storage", "set_", "resize_", "stride"),
        *named_functions("register_hook", "retain_grad", "requires_grad_", "storage_offset"),
        *named_functions("register_post_accumulate_grad_hook", "share_memory_", "is_set_to"),
    ]
)


OF_PIECES.update(
    [
        *_getters("device", "is_cuda", "is_cpu", "requires_grad", "grad_fn", "is_leaf", "is_meta"),
        *named_functions("get_device", "is_contiguous", "element_size", "is_pinned"),
        torch.Tensor.__repr__,
    ]
)


@rule_for(torch.autograd.grad)
def no_gradient_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse gradients with respect to a split tensor: its whole is not in the graph."""
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs", ())
    found = next(iter(split_tensors((inputs,), {})), None)
    if found is not None:
        raise ValueError(refusal(func, found))
    return NO_RULE
