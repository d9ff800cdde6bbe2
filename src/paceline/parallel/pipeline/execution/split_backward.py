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
        # None for a loss
        self._gradients: list[Any] | None = None if is_loss else [gradient for _, gradient in pairs]
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._groups: list[dict[str, Any]] | None = None

    def of_inputs(self, parameters: Iterator[nn.Parameter]) -> None:
        """Compute the gradients of the leaves; a stage without any computes all of them later."""
        given = self._gradients or [None] * len(self._outputs)
        reaching: list[tuple[torch.Tensor, Any]] = []
        others: list[tuple[torch.Tensor, Any]] = []
        for pair in zip(self._outputs, given, strict=True):
            (reaching if self._reaches_leaf(pair[0]) else others).append(pair)
        if not reaching:
            return
        relayed = {id(leaf) for leaf in self._leaves}
        # PyTorch detaches the outputs in place, which neither leaves nor views allow, nor an
        # operation that has saved one to compute another one
        several = len(reaching) > 1
        outputs = [t * 1 if several or id(t) in relayed or t._is_view() else t for t, _ in reaching]
        gradients: Any = [g for _, g in reaching] if self._gradients is not None else None
        weights = (p for p in parameters if p.requires_grad)
        _, self._groups = stage_backward_input(outputs, gradients, self._leaves, weights)
        # PyTorch finds parameters on paths to the leaves only
        self._outputs, self._gradients = [t for t, _ in others], [g for _, g in others]

    def _reaches_leaf(self, output: torch.Tensor) -> bool:
        leaves = {id(leaf) for leaf in self._leaves}
        seen, waiting = {None}, [output.grad_fn]
        while waiting:
            node: Any = waiting.pop()
            if id(getattr(node, "variable", None)) in leaves:
                return True
            if node not in seen:
                seen.add(node)
                waiting.extend(following for following, _ in node.next_functions)
        return id(output) in leaves

    def of_parameters(self, parameters: Iterator[nn.Parameter]) -> None:
        """Add the gradients of the parameters to those that they have."""
        if self._outputs:
            shares_graph = self._groups is not None
            torch.autograd.backward(self._outputs, self._gradients, retain_graph=shares_graph)
        if self._groups is not None:
            stage_backward_weight((p for p in parameters if p.requires_grad), self._groups)
        self._outputs, self._groups = [], None
