"""Adasum (arXiv 2006.02924): a sum that scales gradients by how far they agree in direction."""

import math
import sys
from collections.abc import Sequence

import torch

from .exchange import Exchange

MIN_SQUARED_NORM = math.sqrt(sys.float_info.min)


def is_possible(size: int) -> bool:
    """Return whether this number of ranks is a power of two."""
    return size & (size - 1) == 0


def reduce_tensors(exchange: Exchange, tensors: Sequence[torch.Tensor]) -> None:
    """Reduce each tensor over all ranks in place, by pairs of ranks.

    In round d each rank has the result of 2^d ranks, and combines it with that of the rank whose
    index differs in bit d. Both compute the same, in the order of their indices.
    """
    distance = 1
    while distance < exchange.size:
        peer = exchange.rank ^ distance
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        others = exchange.swap(flat, peer).split([tensor.numel() for tensor in tensors])
        for one, other in zip(tensors, others, strict=True):
            both = (one, other.view_as(one))
            first, second = both if exchange.rank < peer else both[::-1]
            one.copy_(combine(first, second))
        distance *= 2


def combine(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, computed in double precision."""
    a, b = first.double(), second.double()
    product = float((a * b).sum())
    norms = float(a.square().sum()), float(b.square().sum())
    factors = [1 - product / (2 * norm) if norm >= MIN_SQUARED_NORM else 1.0 for norm in norms]
    return (factors[0] * a + factors[1] * b).to(first.dtype)
