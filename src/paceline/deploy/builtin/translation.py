"""One translation of a graph, and the register of rules: a function for each kind of operator."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from .operations import OperationList, encode
from .values import UnsupportedError, Value, row_major, row_major_strides, strided_copy

Constant = torch.Tensor
Held = Any  # Value, Constant, or a tuple of them

# By the name of the operator, "conv2d" for aten.conv2d.default. Filled by the rules_of_ modules.
RULES: dict[str, Callable[["Translation", Node], Held]] = {}


def rule(*names: str) -> Callable[[Any], Any]:
    """Register a function that translates the operators of these names."""

    def register(function: Any) -> Any:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass
class Builtin:
    """The builtin backend's data."""

    program: bytes
    weights: bytes


class Translation:
    """Translates one graph. ``held``: what each node is."""

    def __init__(self, exported: ExportedProgram, dtype: torch.dtype) -> None:
        self.exported, self.dtype = exported, dtype
        self.built = OperationList(dtype)
        self.held: dict[Node, Held] = {}
        self.batch: Any = None

    def run(self) -> Builtin:
        """Return the backend's data. Raises UnsupportedError."""
        inputs = self._inputs()
        outputs: list[int] = []
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self.held[node] = self._translate(node)
        results = next(n for n in self.exported.graph.nodes if n.op == "output").args[0]
        for node in results:
            outputs.append(self._output(node, {*inputs, *outputs}))
        return Builtin(encode(self.built, inputs, outputs), self.built.weight_bytes())

    def _inputs(self) -> list[int]:
        signature = self.exported.graph_signature
        weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        inputs: list[int] = []
        for node in self.exported.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in weights:
                self.held[node] = self._weight(weights[node.name])
            elif node.name in signature.inputs_to_lifted_tensor_constants:
                name = signature.inputs_to_lifted_tensor_constants[node.name]
                self.held[node] = self.exported.constants[name]
            else:
                if not inputs:
                    self.batch = node.meta["val"].shape[0]
                value = Value(-1, self.shape(node))
                value = Value(self.built.new_slot(value.elements), value.shape)
                inputs.append(value.slot)
                self.held[node] = value
        return inputs

    def _weight(self, name: str) -> torch.Tensor:
        if name in self.exported.state_dict:
            found: torch.Tensor = self.exported.state_dict[name].detach()
            return found
        return torch.as_tensor(self.exported.constants[name])  # a buffer that is not saved

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a node without the batch. Raises UnsupportedError."""
        return self.sample_shape(node.meta["val"])

    def sample_shape(self, meta: Any) -> tuple[int, ...]:
        if not isinstance(meta, torch.Tensor):
            raise UnsupportedError("a value that is not a tensor")
        if meta.dim() < 1 or str(meta.shape[0]) != str(self.batch):
            raise UnsupportedError("the first dimension of a value is not the batch")
        if meta.dtype != self.dtype:
            raise UnsupportedError(f"a value of {str(meta.dtype).removeprefix('torch.')}")
        if not all(isinstance(size, int) and size > 0 for size in meta.shape[1:]):
            raise UnsupportedError("a symbolic size that is not the batch")
        return tuple(meta.shape[1:])

    def _translate(self, node: Node) -> Held:
        if node.target is operator.getitem:
            return self.held[node.args[0]][node.args[1]]  # type: ignore[index]
        if isinstance(node.meta.get("val"), torch.SymInt | int | None):
            return None  # a size, of which rules take those of their result; or a check of sizes
        given = [self.held.get(node_input) for node_input in node.all_input_nodes]
        flat = [x for held in given for x in (held if isinstance(held, tuple | list) else (held,))]
        if not any(isinstance(value, Value) for value in flat):
            return self._fold(node)
        name = str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
        if name not in RULES:
            raise UnsupportedError(f"the operator {node.target}")
        return RULES[name](self, node)

    def _fold(self, node: Node) -> Held:
        """Compute a node that depends on no input."""
        if any(self.held.get(node_input) is None for node_input in node.all_input_nodes):
            raise UnsupportedError(f"the operator {node.target} of a size")
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: self.held[n])
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _output(self, node: Any, taken: set[int]) -> int:
        value = self.held.get(node)
        if not isinstance(value, Value):
            raise UnsupportedError("an output that does not depend on an input")
        value = row_major(self.built, value)
        if value.slot in taken:
            shape = (value.elements,)
            value = strided_copy(
                self.built, Value(value.slot, shape), shape, row_major_strides(shape)
            )
        return value.slot

    # For rules:

    def value(self, node: Node, position: int) -> Value:
        """Return an argument that must depend on an input."""
        found = self.held.get(node.args[position])  # type: ignore[arg-type]
        if not isinstance(found, Value):
            raise UnsupportedError(f"the operator {node.target} of constants")
        return found

    def constant(self, node: Node, position: int, name: str = "") -> torch.Tensor | None:
        """Return an argument that must be a weight, or None."""
        given = self.argument(node, position, name)
        if given is None:
            return None
        if isinstance(given, Node):
            found = self.held.get(given)
        else:
            found = torch.tensor(given, dtype=self.dtype)
        if not isinstance(found, torch.Tensor):
            raise UnsupportedError(f"the operator {node.target} whose weights depend on an input")
        return found

    def argument(self, node: Node, position: int, name: str = "", default: Any = None) -> Any:
        """Return an argument of the node by position or name."""
        if position < len(node.args):
            return node.args[position]
        return node.kwargs.get(name, default)

    def axis(self, node: Node, number: int) -> int:
        """Return the dimension of the sample for one of the tensor. Raises for the batch."""
        rank = len(self.value(node, 0).shape) + 1
        axis = number % rank - 1
        if axis < 0:
            raise UnsupportedError(f"the operator {node.target} over the batch")
        return axis


def three_sizes(numbers: Any, rank: int, fill: int) -> list[int]:
    """Return sizes of 1, 2 or 3 dimensions as those of 3, filled at the front."""
    given: Sequence[int] = [numbers] if isinstance(numbers, int) else list(numbers)
    if len(given) == 1:
        given = list(given) * rank
    if not all(isinstance(number, int) for number in given):
        raise UnsupportedError("a symbolic size that is not the batch")
    return [fill] * (3 - len(given)) + list(given)
