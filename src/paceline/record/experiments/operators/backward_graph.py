"""Which operators of a forward a loss depends on, and which of their gradients nobody uses."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class BackwardGraph:
    """Autograd graphs of the backwards of one step.

    Operators are identified by their sequence number, which the node of the autograd graph has.

    Attributes:
        reached: Operators that the losses depend on.
        unneeded: Those whose gradient leads only to parameters that no optimizer updates.
    """

    def __init__(self, optimized: Callable[[], set[int]]) -> None:
        """``optimized``: returns the ids of all parameters that optimizers update, or none if these
        may not be the leaves of the graph.
        """
        self.reached: set[int] = set()
        self.unneeded: set[int] = set()
        self._optimized = optimized

    def add(self, outputs: Iterable[torch.Tensor], whole: bool) -> None:
        """Add the graph of ``outputs``, on which a backward begins.

        ``whole``: gradients of all leaves are computed, and not those of selected inputs.
        """
        roots = [one.grad_fn for one in outputs if one.grad_fn is not None]
        order = _postorder(roots)
        self.reached |= {node._sequence_nr() for node in order}
        optimized = self._optimized()
        if not whole:
            return
        leaves = {id(node): node.variable for node in order if hasattr(node, "variable")}
        if not any(id(leaf) in optimized for leaf in leaves.values()):
            return
        needed: dict[Any, bool] = {}
        for node in order:
            leaf = leaves.get(id(node))
            if leaf is not None:
                is_parameter = isinstance(leaf, torch.nn.Parameter)
                needed[node] = not is_parameter or id(leaf) in optimized
            else:
                after = [needed[one] for one, _ in node.next_functions if one is not None]
                needed[node] = any(after) or not after
        self.unneeded |= {
            node._sequence_nr() for node in order if not needed[node] and id(node) not in leaves
        }


def _postorder(roots: list[Any]) -> list[Any]:
    """Return all nodes of the graph, each one after those that its gradient goes to."""
    order, seen = [], set(roots)
    stack = [(root, iter(root.next_functions)) for root in dict.fromkeys(roots)]
    while stack:
        node, edges = stack[-1]
        for child, _ in edges:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            stack.pop()
            order.append(node)
    return order
