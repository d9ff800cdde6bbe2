"""Products of matrices and ``einsum``: each rank computes with its rows.

Each dim of an operand has a label. An axis of the mesh divides one label: if it is in the result,
the result is divided; otherwise each rank has a part of the sum.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..divided.divided_tensor import NO_RULE, divided_tensors, named_functions
from .exchange import sum_over
from .partition import Partition
from .split_tensor import SplitTensor, rows_at, rule_for, say_gathered

Labels = Sequence[Hashable]


def contract(
    compute: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    labels: Sequence[Labels],
    result: Labels,
) -> Any:
    """Compute a sum of products.

    Args:
        compute: Called with plain operands.
        labels: Of each operand, the labels of its dims.
        result: Those of the result.
    """
    first = next(divided_tensors(list(operands)))
    divided = _divided_labels(operands, labels, result)
    pieces, gathered = [], []
    for operand, own in zip(operands, labels, strict=True):
        parts = {dim: divided[label] for dim, label in enumerate(own) if label in divided}
        if isinstance(operand, SplitTensor):
            axes = {one.axis for one in parts.values()}
            if any(one.axis not in axes for one in operand.parts.values()):
                gathered.append(operand)
        pieces.append(rows_at(operand, parts, first.groups))
    if gathered:
        say_gathered("product", gathered)
    found = compute(*pieces)
    summed = frozenset(one.axis for label, one in divided.items() if label not in result)
    if summed:
        found = sum_over(found, first.groups.groups[summed])
    kept = {result.index(label): one for label, one in divided.items() if label in result}
    return first.like(found, kept)


def _divided_labels(
    operands: Sequence[torch.Tensor], labels: Sequence[Labels], result: Labels
) -> dict[Hashable, Partition]:
    """Return the partition of each label that is divided.

    Of several labels that one axis divides, it is one of the result, and of the largest operand.
    """
    found = [
        (label not in result, -operand.numel(), label, partition)
        for operand, own in zip(operands, labels, strict=True)
        if isinstance(operand, SplitTensor)
        for dim, partition in operand.parts.items()
        for label in (own[dim],)
    ]
    divided: dict[Hashable, Partition] = {}
    for _, _, label, partition in sorted(found, key=lambda one: one[:2]):
        if partition.axis not in {one.axis for one in divided.values()}:
            divided.setdefault(label, partition)
    return divided


@rule_for(*named_functions("matmul", "bmm", "mm", "__matmul__", "__rmatmul__"), anywhere=True)
def matmul(func: Any, a: torch.Tensor, b: torch.Tensor | None = None, **options: Any) -> Any:
    """Compute a product of (batches of) matrices."""
    if options or b is None:
        return NO_RULE
    if func is torch.Tensor.__rmatmul__:
        a, b = b, a
    meta = [torch.empty(one.shape, device="meta") for one in (a, b)]
    dims = torch.matmul(*meta).dim()  # PyTorch's own errors
    has_rows, has_columns = a.dim() > 1, b.dim() > 1
    ends = [("m", "k")[not has_rows :], ("k", "n")[: 1 + has_columns]]
    labels: list[Labels] = []
    for number, (one, end) in enumerate(zip((a, b), ends, strict=True)):
        batch = range(-one.dim(), -2)
        # a dim of extent 1 is broadcast
        labels.append((*(i if one.size(i) > 1 else ("one", number, i) for i in batch), *end))
    rest = [name for name, has in (("m", has_rows), ("n", has_columns)) if has]
    result = (*range(-(dims - len(rest)) - 2, -2), *rest)
    return contract(torch.matmul, (a, b), labels, result)


@rule_for(torch.einsum, anywhere=True)
def einsum(func: Any, equation: Any, *operands: Any) -> Any:
    """Compute an einsum without "..."."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation:
        return NO_RULE
    given, arrow, result = equation.replace(" ", "").partition("->")
    labels = given.split(",")
    if any(len(set(own)) != len(own) for own in labels):
        return NO_RULE
    torch.einsum(equation, *(torch.empty(one.shape, device="meta") for one in operands))
    if not arrow:
        every = given.replace(",", "")
        result = "".join(sorted(one for one in set(every) if every.count(one) == 1))

    def compute(*pieces: torch.Tensor) -> torch.Tensor:
        return torch.einsum(f"{given}->{result}", *pieces)

    return contract(compute, operands, labels, result)
