"""Calls of operators in the profiled steps: what was noted of each, and what follows from all."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from .call_sites import Line
from .machine_limits import DispatchCost

# Backwards that run through the same operators as another backward of their step.


SECOND_BACKWARD = "second backward"  # phase of their operators
MAX_NODE = 1 << 60  # nodes that accumulate gradients all have a larger number


@dataclass
class BackwardRun:
    """One run of the autograd engine.

    Attributes:
        line: Line of the script that began it.
        accumulates: Whether it adds to the gradients of parameters, as ``loss.backward()``.
        creates_graph: Whether its gradients can be differentiated again.
        calls: Operators, by the number of their node in the autograd graph.
    """

    line: Line
    accumulates: bool
    creates_graph: bool
    calls: dict[int, "list[Call]"] = field(default_factory=dict)


def mark_second_backwards(runs: list[BackwardRun]) -> None:
    """Set phase and line of operators of a backward that another one runs through, too.

    Of two backwards, that is the one that does not accumulate gradients, else the later one. A
    backward of second order has to run through the operators again.
    """
    for earlier, later in combinations(runs, 2):
        if earlier.creates_graph:
            continue
        second = earlier if later.accumulates and not earlier.accumulates else later
        for node in earlier.calls.keys() & later.calls.keys():
            for call in second.calls[node] if node < MAX_NODE else ():
                call.phase, call.line = SECOND_BACKWARD, second.line


# Which operators of a forward a loss depends on, and which of their gradients nobody uses.


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
        roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
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
                after = [needed[later] for later, _ in node.next_functions if later is not None]
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


SMALL_FACTOR = 3.0  # a small operator takes at most this many times as long as one on one element


@dataclass(slots=True)
class Call:
    """One call of an operator in a profiled step; bytes are of its inputs and outputs."""

    line: Line
    module: str
    name: str
    phase: str  # OperatorRow (analyze/records/operator_file.py) has the names
    copy: str = ""  # "layout", "cast" or "transfer" for a copy
    shapes: str = ""
    seconds: float = 0.0  # by correct_times without the overhead of the profile
    flops: float = 0.0
    bytes: int = 0
    output_bytes: int = 0
    growth: float = 0.0  # bytes of outputs over bytes of inputs
    is_view: bool = False
    small: bool = False  # takes about as long as its dispatch
    is_recurrent: bool = False  # called by a recurrent layer of PyTorch, not by the script's loop
    random: bool = False
    repeated: bool = False  # the same operator was called on the same values in this step
    same: "Call | None" = None  # the first call of the operator on these values in the step
    made: "Call | None" = None  # the forward call whose gradient this call computes
    unused: bool = False  # its result has no effect on a loss or any other operator
    unneeded: bool = False  # part of a gradient that no optimizer uses
    wide: bool = False  # computes in float64
    widens: bool = False  # has a float64 output and no float64 input
    padding: float = 0.0  # share of the module's inputs that is padding
    pads: bool = False  # its output is an input with padding
    node: int = -1  # sequence number of the autograd node that it made
    is_root: bool = False  # has an effect other than its output
    needs: "list[Call]" = field(default_factory=list)
    is_used: bool = False


@dataclass
class Step:
    """The calls of one profiled step."""

    graph: BackwardGraph
    calls: list[Call] = field(default_factory=list)
    backwards: list[BackwardRun] = field(default_factory=list)
    seconds: float = 0.0


def correct_times(steps: list[Step], cost: DispatchCost, device: str) -> None:
    """Replace the overhead of the profile in all calls by the usual cost of an operator.

    On CPUs the overhead is that of the views in these steps: they have no kernel, and find the
    caches as other operators do.
    """
    overhead = cost.profiled_s
    views = [call.seconds for step in steps for call in step.calls if call.is_view]
    if device == "cpu" and views:
        overhead = max(overhead, statistics.median(views))
    for step in steps:
        for call in step.calls:
            call.small = call.seconds <= SMALL_FACTOR * overhead and not call.is_recurrent
            call.seconds = max(call.seconds - overhead, 0.0) + cost.dispatch_s


def mark_used(steps: list[Step]) -> None:
    """Mark forward calls whose result no loss and no other effect depends on as unused.

    A result may be used in a later step, so the last step is not judged.
    """
    stack: list[Call] = []
    for step in steps:
        stack += [c for c in step.calls if c.is_root or c.node in step.graph.reached]
    while stack:
        call = stack.pop()
        if not call.is_used:
            call.is_used = True
            stack += call.needs
    for step in steps:
        for call in step.calls:
            is_candidate = call.phase == "forward" and call.node >= 0
            call.unused = is_candidate and not call.is_used and bool(step.graph.reached)
            call.needs = []
    for step in steps:
        _correct_repetitions(step.calls)


def _correct_repetitions(calls: list[Call]) -> None:
    """Do not count a call as repeated if nothing uses the result of the first one.

    The first one is needless then, and it has no backward.
    """
    for call in calls:
        if call.made is not None:
            call.repeated = call.repeated and call.made.repeated
        elif call.same is not None and call.same.unused and not call.unused:
            call.repeated = False
    for call in calls:
        call.same = call.made = None
