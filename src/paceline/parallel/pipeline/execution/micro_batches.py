"""Parts of a batch: micro-batches of almost the same number of samples.

The loss of a batch is the mean of those of its micro-batches, unless it is no mean over samples:
with ``ignore_index``, weights of classes, or samples that are compared with each other. That is
seen in some batches, where both are computed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ....plurals import counted
from ...strategy.training_step import TrainingStep

INTERVAL = 100  # batches
MAX_LOSSES = 256
TOLERANCE = 1e-4  # of the largest loss
HALF_TOLERANCE = 2e-2  # of bfloat16 and float16


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
    return [tree_unflatten(list(part), spec) for part in zip(*parts, strict=True)] or [
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


def detached(outputs: Any) -> Any:
    """Return outputs without their graph."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


class LossComparisons:
    """In which batches the loss of a batch is compared with the mean over its micro-batches.

    They are the 1st, 2nd, 4th, 8th and so on, each 100th, and the first one with a negative label,
    which losses of PyTorch ignore: earlier batches may not have had such a label.
    """

    def __init__(self) -> None:
        self._batches: dict[Any, int] = {}
        self._with_ignored: set[Any] = set()

    def is_due(self, loss: Any, targets: Any) -> bool:
        """Return whether the next batch of a loss is compared.

        Args:
            loss: What tells losses apart.
            targets: Of the batch.
        """
        if len(self._batches) >= MAX_LOSSES:
            self._batches.clear()
            self._with_ignored.clear()
        number = self._batches[loss] = self._batches.get(loss, 0) + 1
        is_first = loss not in self._with_ignored and _has_negative_label(targets)
        if is_first:
            self._with_ignored.add(loss)
        return is_first or number & (number - 1) == 0 or number % INTERVAL == 0


def _has_negative_label(targets: Any) -> bool:
    """Return whether there is one on the CPU; on a GPU the question would wait for it."""
    return any(
        bool((leaf < 0).any())
        for leaf in tree_flatten(targets)[0]
        if torch.is_tensor(leaf) and leaf.dtype == torch.long and leaf.device.type == "cpu"
    )


@torch.no_grad()
def whole_loss(
    step: TrainingStep,
    outputs: Sequence[Any],
    targets: Any,
    sizes: Sequence[int],
    losses: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the loss of all outputs, and how far the mean of the losses may be from it.

    Nothing is compared (the distance is infinite) where outputs can't be put together along their
    first dim, where memory does not suffice, and where the loss draws random numbers.
    """
    unknown = torch.tensor([0.0, torch.inf], dtype=torch.float64)
    flat = [tree_flatten(output)[0] for output in outputs]
    each = zip(*flat, strict=True)
    try:
        leaves = [_together(leaf, sizes) for leaf in each]
        states = _generators(losses[0].device)
        loss, _ = step.loss_of(tree_unflatten(leaves, tree_flatten(outputs[0])[1]), targets)
    except (torch.OutOfMemoryError, _NotDividedError):
        return unknown
    if any(not a.equal(b) for a, b in zip(states, _generators(losses[0].device), strict=True)):
        return unknown
    values = [loss.double().reshape(()), *(each_loss.double().reshape(()) for each_loss in losses)]
    is_half = any(torch.is_tensor(t) and t.dtype.itemsize == 2 for t in (*leaves, *losses))
    scale = torch.stack(values).abs().max()
    return torch.stack([values[0], scale * (HALF_TOLERANCE if is_half else TOLERANCE)])


class _NotDividedError(Exception):
    """An output is not divided along its first dim."""


def _together(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = leaves[0]
    if not torch.is_tensor(first):
        return first
    if first.dim() and all(t.size(0) == n for t, n in zip(leaves, sizes, strict=True)):
        return torch.cat(list(leaves))
    if first.dim() or not first.is_floating_point():
        raise _NotDividedError
    # such as an auxiliary loss that the forward returns
    weights = torch.tensor(sizes, dtype=first.dtype, device=first.device) / sum(sizes)
    return (torch.stack(list(leaves)) * weights).sum()


def _generators(device: torch.device) -> list[torch.Tensor]:
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def check_whole(mean: float, whole: float, distance: float) -> None:
    """Raise ValueError if the loss of a batch is not the mean of those of its micro-batches."""
    if distance and abs(mean - whole) > distance:
        raise ValueError(
            f"world.forward_backward: the loss of the batch is {whole:.6g}, and the mean over the "
            f"samples of its micro-batches is {mean:.6g}: it is no mean over samples. HINT: return "
            "the sum over what counts, and its weight (with ignore_index, the number of targets "
            "that are not ignored; with weights of classes, their sum); a loss that compares "
            "samples needs layout='data'"
        )
