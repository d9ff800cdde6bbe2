"""What a rank asks for in one call of a collective, and how the ranks' requests are compared.

The ranks compare a ``Request``; an ``Operation`` is a request with the tensors of this rank.
"""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import torch

from ....plurals import named_ranks

Dimension = Annotated[int, msgspec.Meta(ge=0)]


class Kind(IntEnum):
    """The kinds of operations."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    PROCESS_SET = 6  # agree on a change of the process sets


class ReduceOp(IntEnum):
    """Horovod's reductions, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


# The first dimension may differ between ranks.
UNEVEN_KINDS = (Kind.ALLGATHER, Kind.ALLTOALL)
NO_ROOT = -1


@dataclass(frozen=True)
class Request:
    """One operation as a rank requests it; a grouped operation is one request with many tensors.

    Attributes:
        name: Name by which the ranks' requests are matched.
        shapes, dtypes: Of each tensor.
        device: "cpu", or "cuda" if the tensors are on a GPU.
        op: A ReduceOp, of reductions.
        root: Global rank of the source of a broadcast.
        prescale, postscale: Factors before and after a reduction.
        detail: Further text that must be equal on all ranks.
        is_named: Whether the script chose the name. Others are used once, and not cached.
    """

    name: str
    kind: Kind
    shapes: tuple[tuple[Dimension, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "cpu"
    op: ReduceOp = ReduceOp.SUM
    root: int = NO_ROOT
    prescale: float = 1.0
    postscale: float = 1.0
    detail: str = ""
    is_named: bool = True

    @functools.cached_property
    def signature(self) -> tuple[Any, ...]:
        """Everything that must be equal on all ranks."""
        shapes: Any = self.shapes
        if self.kind in UNEVEN_KINDS:
            shapes = tuple((len(shape), *shape[1:]) for shape in shapes)
        return (
            *(self.kind, shapes, self.dtypes, self.device, self.op, self.root),
            *(self.prescale, self.postscale, self.detail),
        )

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(
            math.prod(shape) * getattr(torch, dtype).itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @functools.cached_property
    def fusion_key(self) -> tuple[Any, ...]:
        """What must be equal for two all-reduces to be exchanged together."""
        return self.op, self.device, self.prescale, self.postscale

    def describe_shapes(self) -> str:
        if len(self.shapes) > 3:
            return f"{len(self.shapes)} tensors, the first of shape {list(self.shapes[0])}"
        return " and ".join(str(list(shape)) for shape in self.shapes) or "none"


@dataclass(eq=False, slots=True)
class Operation:
    """A request with its tensors.

    Attributes:
        request: What the ranks compare.
        inputs: Tensors of this rank.
        outputs: Tensors that receive the result, or None if their shapes are known later.
        splits: Rows for each rank, of an all-to-all.
        submitted_ns: When the operation was submitted (CLOCK_MONOTONIC).
        is_done: Whether ``outputs`` or ``error`` is set.
        error: Reason why it failed.
        event: Of a GPU: when the tensors are ready, then when the result is.
    """

    request: Request
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] | None = None
    splits: list[int] | None = None
    received_splits: Sequence[int] = ()
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    is_done: bool = False
    error: Exception | None = None
    event: Any = None

    def finish(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_done = True


# What may differ: the words for it, its value, and the way out.
_COMPARED: tuple[tuple[str, Any, str], ...] = (
    (
        "operations",
        lambda one: one.kind.name.lower(),
        "call the same operation under this name on all ranks",
    ),
    (
        "numbers of tensors",
        lambda one: len(one.shapes),
        "pass the same list of tensors on all ranks",
    ),
    ("dtypes", lambda one: " and ".join(dict.fromkeys(one.dtypes)), "use the same dtype"),
    (
        "devices",
        lambda one: one.device,
        "move the tensor to the same kind of device on all ranks",
    ),
    ("reductions", lambda one: one.op.name.capitalize(), "pass the same op= on all ranks"),
    ("root ranks", lambda one: one.root, "pass the same root_rank= on all ranks"),
    (
        "scale factors",
        lambda one: f"{one.prescale:g} and {one.postscale:g}",
        "pass the same prescale_factor= and postscale_factor= on all ranks",
    ),
    ("arguments", lambda one: one.detail, "pass the same arguments on all ranks"),
)


def find_mismatch(requests: Mapping[int, Request]) -> str:
    """Return what is wrong with one operation's requests, or "".

    requests: by global rank.
    """
    first = next(iter(requests.values()))
    if all(request.signature == first.signature for request in requests.values()):
        return _invalid(first)
    for words, value, hint in _COMPARED:
        if text := _differing(requests, words, value, hint):
            return text
    beyond = ", except in the first dimension" if first.kind in UNEVEN_KINDS else ""
    hint = f"the tensors of this name must have the same shape on all ranks{beyond}"
    return _differing(requests, "shapes", Request.describe_shapes, hint)


def _invalid(request: Request) -> str:
    """Return why an operation on which all ranks agree is impossible, or ""."""
    has_scalar = any(not shape for shape in request.shapes)
    if has_scalar and request.kind in (*UNEVEN_KINDS, Kind.REDUCESCATTER):
        return (
            f"{request.kind.name.lower()} {request.name!r}: a tensor has no dimensions. HINT: "
            "tensor.reshape(1)"
        )
    return ""


def _differing(requests: Mapping[int, Request], words: str, value: Any, hint: str) -> str:
    sides: dict[Any, list[int]] = {}
    for rank, request in requests.items():
        sides.setdefault(value(request), []).append(rank)
    if len(sides) < 2:
        return ""
    parts = ", ".join(f"{named_ranks(ranks)} {_has(ranks)} {side}" for side, ranks in sides.items())
    first = next(iter(requests.values()))
    return (
        f"ranks disagree about {first.kind.name.lower()} {first.name!r}: mismatched {words}: "
        f"{parts}. HINT: {hint}"
    )


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
