"""A tensor of which each rank holds a part, for code that sees the whole one.

Shape, dtype and device are those of the whole tensor. A function of torch that has a rule computes
with the parts. For other functions, the subclass gathers the whole tensors, or raises an error
(``without_rule``). Nothing else computes with a part alone.

Autograd sees the parts only: a ``DividedTensor`` itself has no memory.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

Rule = Callable[..., Any]
NO_RULE: Any = object()  # a rule returns it where parts are not enough


class Rules:
    """What functions of torch do with the divided tensors of one class."""

    def __init__(self) -> None:
        self._rules: dict[Any, tuple[Rule, bool]] = {}

    def add(self, *functions: Any, anywhere: bool = False) -> Callable[[Rule], Rule]:
        """Register a rule; it is called with the function and its arguments.

        Args:
            functions: Functions of torch; None for one that this version does not have.
            anywhere: Whether the divided tensor can be another argument than the first one.
        """

        def register(rule: Rule) -> Rule:
            for function in functions:
                if function is not None:
                    self._rules[function] = (rule, anywhere)
            return rule

        return register

    def find(self, func: Any, args: tuple[Any, ...]) -> Rule | None:
        """Return the rule for a call."""
        rule, anywhere = self._rules.get(func, (None, False))
        is_first = bool(args) and isinstance(args[0], DividedTensor)
        return rule if anywhere or is_first else None


class DividedTensor(torch.Tensor):
    """A tensor of which this rank holds a part.

    Attributes:
        local: The part; it carries the gradient.
        rules: What functions of torch do with tensors of the class.
        gradient_hint: What to do where a gradient would be lost.
    """

    local: torch.Tensor
    _shape: torch.Size
    rules: ClassVar[Rules]
    gradient_hint: ClassVar[str]

    @classmethod
    def _of_shape(cls, local: torch.Tensor, shape: Iterable[int]) -> Self:
        """Return a tensor of the class; the caller sets how it is divided."""
        whole = torch.Size(shape)
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            whole,
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
        )
        made.local, made._shape = local, whole
        if local.requires_grad and not torch.is_inference_mode_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(cls._refuse_gradient)  # type: ignore[no-untyped-call]
        return made

    # read often, so they do not take the way through ``__torch_function__``

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._shape)

    def dim(self) -> int:
        return len(self._shape)

    def size(self, dim: Any = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    # what a class defines

    def whole(self) -> torch.Tensor:
        """Return the whole tensor. Collective."""
        raise NotImplementedError

    @property
    def divided_dims(self) -> Collection[int]:
        """The dims that are divided."""
        raise NotImplementedError

    def refusal(self, what: str) -> ValueError:
        """Return the error for what can't be computed with parts: "F.fold is not known for"."""
        raise NotImplementedError

    @classmethod
    def without_rule(
        cls, func: Any, tensors: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a function without a rule, or raise ValueError."""
        raise NotImplementedError

    def before_rule(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> None:
        """Called before a rule."""

    def placed(self, local: torch.Tensor, dims: Mapping[int, int]) -> Any:
        """Return a part as a tensor that is divided like this one, along other dims.

        Args:
            dims: Of each divided dim, the dim that it has become.
        """
        raise NotImplementedError

    def in_shape(self, shape: tuple[int, ...], is_view: bool) -> Any:
        """Return the tensor in another shape; NO_RULE if parts are not enough.

        Args:
            is_view: Whether elements must not be copied.
        """
        raise NotImplementedError

    def division_of(self, operands: list[torch.Tensor], shape: torch.Size) -> Any:
        """Return how the result of elementwise operands, of this shape, is divided."""
        raise NotImplementedError

    def aligned(self, operand: Any, shape: torch.Size, division: Any) -> Any:
        """Return the part of an operand for a result of this shape and division.

        Other values are returned as they are.
        """
        raise NotImplementedError

    def divided_like(self, local: torch.Tensor, division: Any) -> Any:
        """Return a part as a tensor with a division of ``division_of``."""
        raise NotImplementedError

    # calls

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_PART:
            return func(*(arg.local if isinstance(arg, cls) else arg for arg in args), **kwargs)
        tensors = [] if func in _OF_WHOLE else list(divided_tensors((args, kwargs)))
        if not tensors:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for tensor in tensors:
            tensor._check_graph()
        args, kwargs = _usual_form(args, kwargs)
        rule = cls.rules.find(func, args)
        if rule is not None:
            tensors[0].before_rule(rule, func, args, kwargs)
            found = rule(func, *args, **kwargs)
            if found is not NO_RULE:
                return found
        return cls.without_rule(func, tensors, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what comes past ``__torch_function__``, such as extensions in C++."""
        raise next(divided_tensors((args, kwargs))).refusal(f"{func} is not known for")

    def _check_graph(self) -> None:
        """Raise ValueError for what an autograd function has returned: its gradient would be lost.

        Nothing of PyTorch itself computes with the wrapper, so that only such a function sets this.
        """
        with torch._C.DisableTorchFunctionSubclass():
            made_by = self.grad_fn
        if made_by is not None:
            raise self.refusal(
                f"{made_by.name()}, a torch.autograd.Function of the script, which can't divide "
                "its backward (or torch.utils.checkpoint without use_reentrant=False), got"
            )

    @classmethod
    def _refuse_gradient(cls, _: torch.Tensor) -> None:
        raise ValueError(
            "a torch.autograd.Function of the script got a tensor that is divided over ranks, and "
            f"its gradient would be lost. HINT: {cls.gradient_hint}"
        )


def divided_tensors(value: Any) -> Iterator[Any]:
    """Yield the divided tensors in nested arguments."""
    if isinstance(value, DividedTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from divided_tensors(item)
    elif isinstance(value, dict):
        yield from divided_tensors(list(value.values()))


def as_whole(value: Any) -> Any:
    """Return the whole tensor of a divided one; another value as it is."""
    return value.whole() if isinstance(value, DividedTensor) else value


def each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nest with other tensors; the same nest if no tensor is another one."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        found = {name: each_tensor(item, change) for name, item in value.items()}
        is_same = all(found[name] is item for name, item in value.items())
        kind: Any = dict if isinstance(value, defaultdict) else type(value)
        return value if is_same else kind(found)
    if isinstance(value, (list, tuple)):
        items = [each_tensor(item, change) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def whole_outputs(outputs: Any) -> Any:
    """Return a nest of outputs with whole tensors. Collective where it has divided ones."""
    return each_tensor(outputs, as_whole)


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


_IN_PLACE = (
    *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_IN_PLACE_NAMES = frozenset({f"__i{name}__" for name in _IN_PLACE} | {"__setitem__", "__set__"})


def is_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    is_magic = name.startswith("__") and name.endswith("__")
    ends = name.endswith("_") and not is_magic
    return ends or name in _IN_PLACE_NAMES or kwargs.get("inplace") is True


def changes_divided(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function changes a divided tensor in place."""
    if any(isinstance(arg, DividedTensor) for arg in tree_flatten(kwargs.get("out"))[0]):
        return True
    return is_in_place(func, kwargs) and next(divided_tensors(args[:1]), None) is not None


def named_functions(*names: str) -> list[Any]:
    """Return the functions of these names in torch, torch.Tensor and torch.nn.functional."""
    places = (torch, torch.Tensor, nn.functional, torch._C._nn)
    return [getattr(place, name) for name in names for place in places if hasattr(place, name)]


def getters(*names: str) -> list[Any]:
    """Return the functions that read attributes of tensors."""
    return [getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)]


def _usual_form(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return arguments with PyTorch's names in place of NumPy's, and the input as the first one."""
    kwargs = {_NAMES_OF_NUMPY.get(name, name): value for name, value in kwargs.items()}
    if not args and "input" in kwargs and "condition" not in kwargs:
        args = (kwargs.pop("input"),)
    return args, kwargs


_NAMES_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}

# functions of shape, dtype and device only
_OF_WHOLE = frozenset(
    [
        *getters("shape", "dtype", "ndim", "layout", "is_sparse", "is_quantized", "is_nested"),
        *getters("is_mkldnn", "itemsize", "device", "is_cuda", "is_cpu", "is_meta", "is_mps"),
        *getters("is_xla", "is_xpu", "names"),
        *named_functions("size", "dim", "ndimension", "numel", "nelement", "is_floating_point"),
        *named_functions("is_complex", "__len__", "is_neg", "is_conj", "get_device"),
        *named_functions("is_tensor", "element_size"),
        torch.Tensor.__hash__,
    ]
)
# functions with the same result for a part
_OF_PART = frozenset(
    [
        *getters("requires_grad", "grad_fn", "is_leaf"),
        *named_functions("is_contiguous", "is_pinned", "is_inference"),
    ]
)
