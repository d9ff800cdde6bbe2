"""Products of matrices and ``einsum``: sums over dims that operands share, which have labels."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .divided_tensor import NO_RULE, Rules, named_functions

Labels = Sequence[Hashable]
# computes with plain operands; called with a function of them, the operands, the labels of the dims
# of each, and those of the result
Contract = Callable[..., Any]


def register_products(rules: Rules, contract: Contract) -> None:
    """Register the rules of this module."""
    names = ("matmul", "bmm", "mm", "__matmul__", "__rmatmul__")
    rules.add(*named_functions(*names), anywhere=True)(functools.partial(_matmul, contract))
    rules.add(torch.einsum, anywhere=True)(functools.partial(_einsum, contract))


def _matmul(
    contract: Contract, func: Any, a: torch.Tensor, b: torch.Tensor | None = None, **options: Any
) -> Any:
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


def _einsum(contract: Contract, func: Any, equation: Any, *operands: Any) -> Any:
    """Compute an einsum without "..."."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation:
        return NO_RULE
    given, arrow, result = equation.replace(" ", "").partition("->")
    labels = given.split(",")
    if any(len(set(own)) != len(own) for own in labels):
        return NO_RULE
    torch.einsum(equation, *(torch.empty(operand.shape, device="meta") for operand in operands))
    if not arrow:
        every = given.replace(",", "")
        result = "".join(sorted(one for one in set(every) if every.count(one) == 1))

    def compute(*pieces: torch.Tensor) -> torch.Tensor:
        return torch.einsum(f"{given}->{result}", *pieces)

    return contract(compute, operands, labels, result)
