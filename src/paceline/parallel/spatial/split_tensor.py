"""A tensor of which each rank holds a part, and the functions of PyTorch that compute with it.

``SplitTensor`` shows the shape of the whole tensor. A function of PyTorch is called with it in one
of three ways: a handler computes this rank's part of the result, or the whole tensor is gathered
(a flatten before a head), or it is refused. Nothing else computes with the part alone.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...comm.group_device import exchangeable
from .exchange import Line, fetch, rows_of
from .layer_names import layer
from .partition import Partition

Handler = Callable[..., Any]

HANDLERS: dict[Any, Handler] = {}
_ANYWHERE: set[Handler] = set()  # handlers whose first argument can be another tensor


class SpatialGroups:
    """The ranks that share this rank's samples.

    Attributes:
        lines: Of each divided axis of the mesh, its ranks.
        groups: The process group of each set of axes.
        is_compared: Whether the model is compared with that of one process: random numbers are
            those of one process, and nothing is printed.
    """

    def __init__(self, lines: Mapping[str, Line], groups: Mapping[frozenset[str], Any]) -> None:
        self.lines, self.groups = lines, groups
        self.is_compared = False
        self.say: Callable[[str], None] = lambda line: None
        self._said: set[str] = set()

    def say_once(self, what: str, rest: str) -> None:
        """Print a line about what is gathered, once for each layer and function (``what``)."""
        if not self.is_compared and what not in self._said:
            self._said.add(what)
            self.say(f"{what} {rest}")

    def over(self, parts: Mapping[int, Partition], dims: Iterable[int]) -> Any:
        """Return the group over which the divided ones of some dims lie; None without one."""
        axes = frozenset(parts[dim].axis for dim in dims if dim in parts)
        return self.groups[axes] if axes else None

    @property
    def all(self) -> Any:
        """The group of all ranks that share this rank's samples."""
        return self.groups[frozenset(self.lines)]

    def numbers(self, number: int) -> dict[int, int]:
        """Return a number of each rank that shares this rank's samples, by rank. Collective."""
        own = exchangeable(torch.tensor([number]), self.all)
        ranks = dist.get_process_group_ranks(self.all)
        found = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(found, own, group=self.all)
        return {rank: int(one) for rank, one in zip(ranks, found, strict=True)}

    @property
    def offset(self) -> int:
        """A number that differs between the ranks that share a sample."""
        number = 0
        for line in self.lines.values():
            number = number * len(line.ranks) + line.place
        return number


class SplitTensor(torch.Tensor):
    """This rank's part of a tensor, with the shape of the whole.

    Attributes:
        local: The part; it carries the gradient.
        parts: Of each divided dim, the partition of its rows.
        groups: The ranks that hold the other parts.
    """

    local: torch.Tensor
    parts: dict[int, Partition]
    groups: SpatialGroups

    @staticmethod
    def __new__(
        cls: type["SplitTensor"],
        local: torch.Tensor,
        parts: Mapping[int, Partition],
        groups: SpatialGroups,
    ) -> "SplitTensor":
        shape = list(local.shape)
        for dim, partition in parts.items():
            first, end = partition.part(groups.lines[partition.axis].place)
            assert shape[dim] == end - first, (shape, dim, partition)
            shape[dim] = partition.rows
        made: SplitTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made.local, made.parts, made.groups = local, dict(parts), groups
        if made.requires_grad:
            made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = ", ".join(f"dim {dim}: {one.axis}" for dim, one in self.parts.items())
        return f"SplitTensor(shape={tuple(self.shape)}, {where}, local={self.local!r})"

    def like(self, local: torch.Tensor, parts: Mapping[int, Partition] | None = None) -> Any:
        """Return a tensor on the same ranks; a plain one if no dim is divided."""
        parts = self.parts if parts is None else parts
        return SplitTensor(local, parts, self.groups) if parts else local

    def whole(self, dims: Iterable[int] | None = None) -> torch.Tensor:
        """Return the whole tensor on all ranks, or whole along some dims. Collective."""
        _check_autograd(self)
        found, parts = self.local, dict(self.parts)
        for dim in self.parts if dims is None else dims:
            if dim in parts:
                partition = parts.pop(dim)
                found = _gathered(found, dim, partition, self.groups)
        result: torch.Tensor = self.like(found, parts)
        return result

    @property
    def slices(self) -> tuple[slice, ...]:
        """Which part of the whole tensor this rank holds."""
        found = [slice(None)] * self.local.dim()
        for dim, one in self.parts.items():
            found[dim] = slice(*one.part(self.groups.lines[one.axis].place))
        return tuple(found)

    def moved(self, parts: Mapping[int, Partition]) -> "SplitTensor":
        """Return the same tensor with other borders between the ranks. Collective."""
        assert parts.keys() == self.parts.keys()
        local = self.local
        for dim, new in parts.items():
            line = self.groups.lines[new.axis]
            local = fetch(local, dim, self.parts[dim], rows_of(new.parts()), line)
        return SplitTensor(local, parts, self.groups)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not args and "input" in kwargs:
            kwargs = dict(kwargs)
            args = (kwargs.pop("input"),)
        handler = HANDLERS.get(func)
        is_first = bool(args) and isinstance(args[0], SplitTensor)
        if handler is None or not (is_first or handler in _ANYWHERE):
            raise _refusal(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            for one in (*args, *kwargs.values()):
                if (found := first_split([one])) is not None:
                    _check_autograd(found)
            return handler(func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refusal(func, args, kwargs or {})


def _check_autograd(tensor: SplitTensor) -> None:
    """Raise ValueError for what an autograd function has returned: its gradient would be lost.

    Nothing of PyTorch itself computes with the wrapper, so that only such a function sets this.
    """
    with torch._C.DisableTorchFunctionSubclass():
        made_by = tensor.grad_fn
    if made_by is not None:
        raise refused(
            f"{made_by.name()}, an autograd function of the script or of torch.utils.checkpoint, "
            "got a tensor",
            "checkpoint(..., use_reentrant=False); for other functions gather it for this layer: "
            "rules={'NAME': 'gather'}",
        )


def _refuse_gradient(_: torch.Tensor) -> None:
    raise ValueError(
        "an autograd function of the script got a tensor whose sample is divided over ranks, and "
        "its gradient would be lost. HINT: call it with world.whole(tensor)"
    )


def _gathered(
    local: torch.Tensor, dim: int, partition: Partition, groups: SpatialGroups
) -> torch.Tensor:
    windows = rows_of([(0, partition.rows)] * partition.ranks)
    return fetch(local, dim, partition, windows, groups.lines[partition.axis])


def split(
    tensor: torch.Tensor, parts: Mapping[int, Partition], groups: SpatialGroups
) -> SplitTensor:
    """Return this rank's part of a tensor that all ranks have."""
    return SplitTensor(part_of(tensor, parts, groups).contiguous(), parts, groups)


def part_of(
    tensor: torch.Tensor, parts: Mapping[int, Partition], groups: SpatialGroups
) -> torch.Tensor:
    """Return the rows of this rank of a plain tensor."""
    for dim, partition in parts.items():
        first, end = partition.part(groups.lines[partition.axis].place)
        tensor = tensor.narrow(dim, first, end - first)
    return tensor


def handles(*functions: Any, anywhere: bool = False) -> Callable[[Handler], Handler]:
    """Register a handler; it is called with the function and its arguments.

    Args:
        anywhere: The divided tensor need not be the first argument.
    """

    def register(handler: Handler) -> Handler:
        if anywhere:
            _ANYWHERE.add(handler)
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


def first_split(values: Iterable[Any]) -> SplitTensor | None:
    """Return the first divided tensor among arguments and lists of them."""
    for value in values:
        if isinstance(value, SplitTensor):
            return value
        if isinstance(value, (list, tuple)) and (found := first_split(value)) is not None:
            return found
    return None


def refused(what: str, hint: str) -> ValueError:
    """Return the error for what can't be computed with parts of a sample."""
    return ValueError(f"{layer()}: {what}, whose sample is divided over ranks. HINT: {hint}")


def _refusal(func: Any, args: Any, kwargs: Any) -> ValueError:
    name = str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))
    if name.endswith("__get__"):
        name = f"the attribute {getattr(func.__self__, '__name__', '')}"
    found = first_split((*args, *kwargs.values()))
    shape = f" of shape {tuple(found.shape)}" if found is not None else ""
    return refused(
        f"{name} is not known to be right for a tensor{shape}",
        "gather it for this layer (rules={'NAME': 'gather'} with the layer's name), or call "
        ".whole() on the tensor first",
    )
