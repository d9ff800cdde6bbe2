"""Gradients that a plain ``optimizer.step()`` has used, and that the script has not zeroed.

``world.step`` zeroes the gradients, ``optimizer.step()`` does not. The next ``world.backward``
would add to them, as if batches were accumulated, which ``world.distribute(accumulate=...)`` sets.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ..optim.whole_norms import local_part

_weak_reference: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]
_Used = tuple[torch.Tensor, Any, int, int]  # parameter, its gradient, address, version


class UsedGradients:
    """The gradients of the last plain steps."""

    def __init__(self) -> None:
        self._used: list[_Used] = []

    def note_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that a step has used the gradients of its parameters."""
        for parameter in parameters:
            if parameter.grad is not None:
                # a weak reference: the memory is free as soon as the script zeroes the gradient
                own = local_part(parameter.grad)
                used = (parameter, _weak_reference(own), own.data_ptr(), own._version)
                self._used.append(used)

    def discard(self) -> None:
        """Discard the gradients that have not changed since their step."""
        for parameter, weak, address, version in self._used:
            if parameter.grad is None or weak.expired():
                continue
            own = local_part(parameter.grad)
            if (own.data_ptr(), own._version) == (address, version):
                parameter.grad = None
        self._used.clear()
