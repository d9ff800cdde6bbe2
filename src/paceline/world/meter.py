"""Exact sums over all ranks, which are part of the checkpoint."""

from collections.abc import Callable
from typing import Any

import torch


class Meter:
    """Adds named numbers on every rank; ``sum`` and ``ratio`` are over all ranks.

    Created by ``world.meter()``. Sums are float64: integers are exact up to 2**53.
    """

    def __init__(
        self,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        is_counted: Callable[[], bool],
    ) -> None:
        self._reduce = reduce
        self._is_counted = is_counted
        self._sums: dict[str, torch.Tensor | float] = {}

    def add(self, **values: Any) -> None:
        """Add numbers or tensors of one element, of any dtype, on any device.

        A GPU is not synchronized.

        Raises:
            ValueError: A tensor has several elements.
        """
        if not self._is_counted():
            return  # this rank repeats a sample only to stay in step with the others
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"meter.add: {name} must be a number or a tensor of one element; this has "
                        f"the shape {tuple(value.shape)}. HINT: meter.add({name}=tensor.sum())"
                    )
                value = value.detach().reshape(()).double()
            self._sums[name] = self._sums.get(name, 0.0) + value

    def sum(self, *names: str) -> tuple[float, ...]:
        """Return the sums of the named numbers over all ranks, 0.0 for a name without numbers.

        Collective: every rank must call it.
        """
        local_sums = [float(self._sums.get(name, 0.0)) for name in names]
        total = self._reduce(torch.tensor(local_sums, dtype=torch.float64))
        return tuple(total.tolist())

    def ratio(self, numerator: str, denominator: str) -> float:
        """Return ``sum(numerator) / sum(denominator)`` over all ranks. Collective.

        Raises:
            ValueError: The denominator is zero, for instance because nothing was added.
        """
        numerator_sum, denominator_sum = self.sum(numerator, denominator)
        if denominator_sum == 0:
            raise ValueError(
                f"meter.ratio({numerator!r}, {denominator!r}): the sum of {denominator!r} over all "
                f"ranks is 0. HINT: meter.add({numerator}=..., {denominator}=...) in the loop"
            )
        return numerator_sum / denominator_sum

    def state_dict(self) -> dict[str, float]:
        """Return this rank's sums by name."""
        return {name: float(value) for name, value in self._sums.items()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore this rank's sums."""
        self._sums = dict(state)
