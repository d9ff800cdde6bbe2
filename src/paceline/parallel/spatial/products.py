"""Products of matrices and ``einsum``: each rank computes with its rows.

Each dim of an operand has a label. An axis of the mesh divides one label: if it is in the result,
the result is divided; otherwise each rank has a part of the sum.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..divided.divided_tensor import divided_tensors
from ..divided.products import Labels, register_products
from .exchange import sum_over
from .partition import Partition
from .split_tensor import RULES, SplitTensor, rows_at, say_gathered


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
        # a dim of extent 1 is broadcast
        parts = {dim: one for dim, one in parts.items() if operand.size(dim) == one.rows}
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
        if partition.rows > 1  # one row may be broadcast
        for label in (own[dim],)
    ]
    divided: dict[Hashable, Partition] = {}
    for _, _, label, partition in sorted(found, key=lambda one: one[:2]):
        if partition.axis not in {one.axis for one in divided.values()}:
            divided.setdefault(label, partition)
    return divided


register_products(RULES, contract)
