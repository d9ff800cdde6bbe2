"""Exchange of gradients that another framework has computed, as tensors of torch.

The gradients of a step are submitted in one or several parts. The core fuses them, and exchanges
them in its thread until this rank waits for all parts.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..core.coordinator import Coordinator
from ..core.operation import Operation
from ..core.requests import Kind
from .gradient_exchange import ExchangeOptions, packed
from .submission import checked, coordinator_of, new_request, reduce_op


class GradientList:
    """Gradients of one step on this rank.

    Args:
        options: How gradients are exchanged. ``groups`` and ``sparse_as_dense`` are not used.
        in_place: Whether the results replace the gradients.
    """

    def __init__(self, options: ExchangeOptions, in_place: bool) -> None:
        self._options, self._in_place = options, in_place
        self._coordinator: Coordinator = coordinator_of(options.process_set)
        self._sent: list[tuple[Operation, list[Any]]] = []  # with contexts of the compression

    def submit(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """Submit gradients, each under its name.

        Raises:
            ValueError: A gradient can't be exchanged.
        """
        parts = [
            self._operation("allreduce", name, [gradient])
            for name, gradient in zip(names, gradients, strict=True)
        ]
        self._submit(parts)

    def submit_group(self, name: str, gradients: Sequence[torch.Tensor]) -> None:
        """Submit gradients that are reduced together."""
        self._submit([self._operation("grouped_allreduce", name, gradients)])

    def wait(self) -> list[torch.Tensor]:
        """Wait for all submitted gradients, and return their results in the same order."""
        sent, self._sent = self._sent, []
        self._coordinator.wait_all([operation for operation, _ in sent])
        decompress = self._options.compression.decompress
        return [
            decompress(result, context)
            for operation, contexts in sent
            for result, context in zip(operation.outputs or (), contexts, strict=True)
        ]

    def _submit(self, parts: list[tuple[Operation, list[Any]]]) -> None:
        self._coordinator.submit_all([operation for operation, _ in parts])
        self._sent += parts

    def _operation(
        self, prefix: str, name: str, gradients: Sequence[torch.Tensor]
    ) -> tuple[Operation, list[Any]]:
        options = self._options
        pairs = [options.compression.compress(packed(gradient.detach())) for gradient in gradients]
        inputs = checked(prefix, [tensor for tensor, _ in pairs], reduces=True)
        factors = options.factors
        op = reduce_op(options.op, None)
        request = new_request(
            prefix, Kind.ALLREDUCE, inputs, name, options.process_set, op, factors
        )
        # A compressed gradient is a copy.
        owned = [
            self._in_place or tensor.data_ptr() != own.data_ptr()
            for tensor, own in zip(inputs, gradients, strict=True)
        ]
        outputs = [
            tensor if is_own else torch.empty_like(tensor)
            for tensor, is_own in zip(inputs, owned, strict=True)
        ]
        return Operation(request, inputs, outputs), [context for _, context in pairs]
