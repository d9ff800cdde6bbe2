"""A backward in two parts: first the gradients of a stage's inputs, later those of its parameters.

The stage before waits for the first part only. It stands on the functions that PyTorch's own
zero-bubble schedules use.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class SplitBackward:
    """The backward of one micro-batch in one stage.

    Args:
        outputs: What the stage has computed; of the last stage, its loss.
        gradients: Of each output; None: it has none, or it is the loss.
        leaves: What the stage has received.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        leaves: Sequence[torch.Tensor],
    ) -> None:
        is_loss = len(outputs) == 1 and gradients[0] is None
        pairs = [
            (t, g)
            for t, g in zip(outputs, gradients, strict=True)
            if t.requires_grad and (is_loss or g is not None)
        ]
        self._outputs = [tensor for tensor, _ in pairs]
        self._gradients = None if is_loss else [gradient for _, gradient in pairs]
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._groups: list[dict[str, Any]] | None = None

    def of_inputs(self, parameters: Iterator[nn.Parameter]) -> None:
        """Compute the gradients of the leaves; a stage without any computes all of them later."""
        if not self._outputs or not self._leaves:
            return
        relayed = {id(leaf) for leaf in self._leaves}
        # PyTorch detaches the outputs in place, which neither leaves nor views allow
        outputs = [t.view_as(t) if id(t) in relayed else t for t in self._outputs]
        outputs = [t * 1 if t._is_view() else t for t in outputs]
        given: Any = self._gradients
        weights = (p for p in parameters if p.requires_grad)
        _, self._groups = stage_backward_input(outputs, given, self._leaves, weights)
        self._outputs = []

    def of_parameters(self, parameters: Iterator[nn.Parameter]) -> None:
        """Add the gradients of the parameters to those that they have."""
        if self._groups is not None:
            stage_backward_weight((p for p in parameters if p.requires_grad), self._groups)
        elif self._outputs:
            torch.autograd.backward(self._outputs, self._gradients)
        self._outputs, self._groups = [], None
