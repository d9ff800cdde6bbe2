"""Backwards that run through the same operators as another backward of their step."""

from dataclasses import dataclass, field
from itertools import combinations
from typing import Protocol

from .call_sites import Line

SECOND_BACKWARD = "second backward"  # phase of their operators
MAX_NODE = 1 << 60  # nodes that accumulate gradients all have a larger number


class BackwardCall(Protocol):
    """A call of an operator, as far as it is changed here."""

    line: Line
    phase: str


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
    calls: dict[int, list[BackwardCall]] = field(default_factory=dict)


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
