"""Gradients that TensorFlow and Keras have computed: their names and groups, and their exchange.

The gradients of a step are submitted in one or several parts, as tensors of torch. The core fuses
them, and exchanges them in its thread until this rank waits for all parts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .core.coordinator import Coordinator
from .core.process_sets import ProcessSet
from .core.requests import Kind, Operation, ReduceOp
from .torch.basics import Average, Sum
from .torch.gradient_exchange import ExchangeOptions, packed
from .torch.named_parameters import groups_of, number_or_groups, split_evenly
from .torch.submission import checked, coordinator_of, new_request, reduce_op

# Returns the exchanged gradients from gradients, their names, the options, and the numbers of those
# that are reduced together.
Exchange = Callable[[list[Any], list[str], ExchangeOptions, list[list[int]]], list[Any]]


_unnamed: Counter[int | None] = Counter()  # optimizers without a name, by process set


class GradientRules:
    """The rules for the gradients of one optimizer or tape.

    Gradients are named by numbers: ranks may have given other names to their variables, because
    they have built other models before.

    Args:
        prefix: Beginning of the names, the same on all ranks. "": of an optimizer, by its number
            in the order of the first exchanges, which is the same on all ranks even if some have
            created further optimizers.
        options: How gradients are exchanged.
        groups: Number of groups of gradients that are reduced together, or lists of variables.
        scales_local: Whether gradients of local variables are divided by the number of ranks.
    """

    def __init__(
        self, prefix: str, options: ExchangeOptions, groups: Any, scales_local: bool
    ) -> None:
        self.options = options
        self._prefix, self._groups, self._scales_local = prefix, groups, scales_local
        self._local: dict[int, Any] = {}  # by identity

    @property
    def are_exchanged(self) -> bool:
        """Whether this rank exchanges gradients with others."""
        members = self.options.process_set
        return bool(members.included()) and (members.size() or 1) > 1

    def add_local(self, variables: Iterable[Any]) -> None:
        """Exclude variables from the exchange: each rank keeps its own gradient."""
        self._local |= {id(variable): variable for variable in variables}

    def exchange(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        function: Exchange,
        numbers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return the gradients after their exchange. Those that are None remain so.

        Args:
            numbers: Number of each variable, the same on all ranks; None: its position.
        """
        if not self.are_exchanged:
            return list(gradients)
        if not self._prefix:
            number = self.options.process_set.process_set_id
            self._prefix = f"optimizer.{_unnamed[number]}"
            _unnamed[number] += 1
        numbers = range(len(variables)) if numbers is None else numbers
        results = list(gradients)
        local = [at for at, one in enumerate(variables) if id(one) in self._local]
        chosen = [at for at, one in enumerate(gradients) if one is not None and at not in local]
        if chosen:
            names = [f"{self._prefix}.{numbers[at]}" for at in chosen]
            groups = self._groups_of([variables[at] for at in chosen])
            own = [gradients[at] for at in chosen]
            for at, result in zip(chosen, function(own, names, self.options, groups), strict=True):
                results[at] = result
        if self._scales_local:
            size = self.options.process_set.size() or 1
            for at in local:
                if results[at] is not None:
                    results[at] = _divided(results[at], size)
        return results

    def _groups_of(self, variables: list[Any]) -> list[list[int]]:
        """Return the numbers of the variables of each group; [] without groups."""
        if not self._groups:
            return []
        if isinstance(self._groups, int):
            return split_evenly(range(len(variables)), self._groups)
        numbers = {id(one): at for at, one in enumerate(variables)}
        groups = [
            [numbers.pop(id(one)) for one in group if id(one) in numbers] for group in self._groups
        ]
        return [group for group in groups if group] + [[at] for at in numbers.values()]


def _divided(gradient: Any, number: int) -> Any:
    """Return a gradient divided by a number. It may be ``tf.IndexedSlices``."""
    if not hasattr(gradient, "dense_shape"):
        return gradient / number
    return type(gradient)(gradient.values / number, gradient.indices, gradient.dense_shape)


def new_rules(
    prefix: str,
    compression: Any,
    sparse_as_dense: bool,
    op: Any,
    predivide_factor: float,
    num_groups: int,
    groups: Any,
    process_set: ProcessSet,
    scales_local: bool,
    ops: Sequence[ReduceOp] = (Average, Sum),
) -> GradientRules:
    """Return rules from arguments of ``DistributedOptimizer`` or ``DistributedGradientTape``.

    ops: Reductions that are possible.

    Raises:
        ValueError: An argument is invalid.
    """
    how = reduce_op(op, None)
    if how not in ops:
        raise ValueError(
            f"op={how.name.capitalize()} is not possible: op currently only supports "
            f"{', '.join(one.name.capitalize() for one in ops)}. HINT: op=hvd.Average"
        )
    options = ExchangeOptions(compression, how, predivide_factor, 0, sparse_as_dense, process_set)
    groups = number_or_groups(groups_of(num_groups, groups, level=4), "variables")
    return GradientRules(prefix, options, groups, scales_local)


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
        self._coordinator.wait([operation for operation, _ in sent])
        decompress = self._options.compression.decompress
        return [
            decompress(result, context)
            for operation, contexts in sent
            for result, context in zip(operation.outputs or (), contexts, strict=True)
        ]

    def _submit(self, parts: list[tuple[Operation, list[Any]]]) -> None:
        self._coordinator.submit([operation for operation, _ in parts])
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
