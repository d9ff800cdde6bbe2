"""The list of operations that ``native/src/builtin.c`` executes, and its encoding.

A slot is a buffer for one value of each sample. While a list is built, every value has a slot of
its own; ``encode`` lets values that are not alive at the same time share one.
"""

import struct
from dataclasses import dataclass, field

import numpy as np
import torch

LINEAR, CONVOLUTION, POOL, UNARY, BINARY, SOFTMAX, NORMALIZE, COPY, FILL, REDUCE, MATRICES = range(
    1, 12
)
IN_PLACE = {UNARY, BINARY, SOFTMAX, NORMALIZE}
UNARIES = [
    *("relu", "leaky_relu", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "elu", "softplus"),
    *("exp", "clamp", "abs", "neg", "sqrt", "square", "reciprocal", "sin", "cos", "log", "power"),
]
BINARIES = [
    *("add", "subtract", "subtract_from", "multiply", "divide", "divide_into"),
    *("maximum", "minimum"),
]
REDUCTIONS = ["sum", "mean", "max", "min"]
POOLS = ["max", "mean", "mean_with_padding"]
MAX_SLOTS = 4096


@dataclass
class Operation:
    """One operation.

    Attributes:
        kind, function: LINEAR ..., and which one of UNARIES, BINARIES, REDUCTIONS or POOLS.
        source, dest: Slots.
        words: Sizes, offsets of weights and numbers, in the order that ``builtin.c`` reads.
        second: Slot of the second operand, if there is one.
        second_at: Its position among ``words``.
    """

    kind: int
    function: int
    source: int
    dest: int
    words: list[int | float]
    second: int | None = None
    second_at: int = 0


@dataclass
class OperationList:
    """Operations, slots (elements of each sample) and weights."""

    dtype: torch.dtype
    slots: list[int] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    _weights: list[np.ndarray] = field(default_factory=list)
    _weight_count: int = 0

    def new_slot(self, elements: int) -> int:
        self.slots.append(elements)
        return len(self.slots) - 1

    def add(
        self, kind: int, function: int, source: int, elements: int, words: list[int | float]
    ) -> int:
        """Append an operation whose result has ``elements`` elements. Return its slot."""
        dest = self.new_slot(elements)
        self.operations.append(Operation(kind, function, source, dest, words))
        return dest

    def store(self, tensor: torch.Tensor | None) -> int:
        """Store weights in row-major order. Return their offset in elements; -1 for None."""
        if tensor is None:
            return -1
        array = tensor.detach().to("cpu", self.dtype).contiguous().numpy().reshape(-1)
        offset = self._weight_count
        self._weights.append(array)
        self._weight_count += array.size
        return offset

    def weight_bytes(self) -> bytes:
        width = "<f4" if self.dtype == torch.float32 else "<f8"
        return b"".join(weights.astype(width).tobytes() for weights in self._weights)


def encode(built: OperationList, inputs: list[int], outputs: list[int]) -> bytes:
    """Return the list as words of 64 bits, with slots shared between values."""
    place, sizes = _share_slots(built, inputs, outputs)
    if len(sizes) > MAX_SLOTS:
        raise ValueError(f"{len(sizes)} values at the same time")
    words: list[int | float] = [len(sizes), *sizes, *(place[slot] for slot in (*inputs, *outputs))]
    words.append(len(built.operations))
    for operation in built.operations:
        rest = list(operation.words)
        if operation.second is not None:
            rest.insert(operation.second_at, place[operation.second])
        words += [
            operation.kind,
            operation.function,
            place[operation.source],
            place[operation.dest],
            *rest,
        ]
    return b"".join(struct.pack("<d" if isinstance(w, float) else "<q", w) for w in words)


def _share_slots(
    built: OperationList, inputs: list[int], outputs: list[int]
) -> tuple[dict[int, int], list[int]]:
    """Return the shared slot of each value, and the sizes of the shared slots."""
    last: dict[int, int] = {}
    for i, operation in enumerate(built.operations):
        for slot in (operation.source, operation.dest, operation.second):
            if slot is not None:
                last[slot] = i
    own = {*inputs, *outputs}
    place: dict[int, int] = {}
    sizes: list[int] = []
    free: dict[int, list[int]] = {}
    for slot in (*inputs, *outputs):
        place[slot] = len(sizes)
        sizes.append(built.slots[slot])
    for i, operation in enumerate(built.operations):
        reads = [
            slot
            for slot in (operation.source, operation.second)
            if slot is not None and slot not in own
        ]
        ended = [
            slot for slot in dict.fromkeys(reads) if last[slot] == i and slot != operation.dest
        ]
        if operation.kind in IN_PLACE:  # may overwrite what it reads for the last time
            for slot in ended:
                free.setdefault(built.slots[slot], []).append(place[slot])
        if operation.dest not in place:
            size = built.slots[operation.dest]
            if free.get(size):
                place[operation.dest] = free[size].pop()
            else:
                place[operation.dest] = len(sizes)
                sizes.append(size)
        if operation.kind not in IN_PLACE:
            for slot in ended:
                free.setdefault(built.slots[slot], []).append(place[slot])
    return place, sizes
