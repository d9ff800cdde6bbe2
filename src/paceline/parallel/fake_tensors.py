"""Tensors without data: what a forward does to shapes, without its memory and its time."""

from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


class OneFakeMode(FakeTensorMode):
    """FakeTensorMode whose tensors can be deep-copied, as nn.TransformerEncoder does.

    A deep copy of a fake tensor copies its mode, and tensors of two modes cannot be combined.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "OneFakeMode":
        return self
