"""Parts of a batch: micro-batches of almost the same number of samples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...plurals import counted


def samples_of(*trees: Any) -> int:
    """Return the number of samples of a batch: the first dim of all its tensors.

    Raises:
        ValueError: Tensors differ in it, or there is none.
    """
    sizes: dict[int, None] = dict.fromkeys(t.size(0) for tree in trees for t in _divisible(tree))
    if len(sizes) == 1:
        return next(iter(sizes))
    if not sizes:
        raise ValueError(
            "pipeline: neither inputs nor targets have a tensor with samples. HINT: "
            "world.forward_backward(model, inputs, targets, loss=...)"
        )
    raise ValueError(
        "pipeline: the first dim of inputs and targets is that of the samples, and their tensors "
        f"have {' and '.join(map(str, sizes))} there. HINT: expand a tensor that is the same for "
        "all samples: mask.expand(len(x), ...), or make it a buffer of the model"
    )


def _divisible(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if torch.is_tensor(leaf) and leaf.dim()]


def sizes_of(samples: int, count: int) -> list[int]:
    """Return the samples of each micro-batch: larger ones first, none is empty."""
    count = max(min(count, samples), 1)
    least, more = divmod(samples, count)
    return [least + 1] * more + [least] * (count - more)


def split(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the tree of each micro-batch, with views of the tensors."""
    flat, spec = tree_flatten(tree)
    parts = [
        leaf.split(list(sizes)) if torch.is_tensor(leaf) and leaf.dim() else [leaf] * len(sizes)
        for leaf in flat
    ]
    return [tree_unflatten(list(one), spec) for one in zip(*parts, strict=True)] or [
        tree for _ in sizes
    ]


def check_count(samples: int, count: int) -> None:
    """Raise ValueError for a first batch with fewer samples than micro-batches."""
    if samples < count:
        raise ValueError(
            f"pipeline: a batch of {counted(samples, 'sample')} can't be divided into "
            f"{counted(count, 'micro-batch', 'micro-batches')}. HINT: layout='... + "
            f"micro-batches={samples}', or at least {count} samples for each data rank"
        )
