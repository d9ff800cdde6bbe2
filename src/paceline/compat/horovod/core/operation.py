"""One submitted operation of this rank, from its submission to its result."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .requests import Request


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
