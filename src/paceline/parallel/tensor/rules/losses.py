"""Cross entropy of logits whose classes (vocabulary) are divided over the ranks.

Each rank exchanges three numbers for each sample, and never gathers the logits.
"""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ...divided.divided_tensor import NO_RULE, as_whole
from ..exchange import total
from ..split_tensor import SplitTensor, piece_at, rule_for
from ..splits import Split


@rule_for(F.cross_entropy)
def cross_entropy(
    func: Any,
    x: SplitTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the cross entropy of this rank's classes, and add those of all ranks."""
    dim = 1 if x.dim() > 1 else 0
    if isinstance(target, SplitTensor) or size_average is not None or reduce is not None:
        return NO_RULE
    if x.division != Split(dim) or not 0 <= label_smoothing <= 1:
        return NO_RULE
    if reduction not in ("none", "mean", "sum"):
        return NO_RULE
    are_classes = not target.is_floating_point()
    without_classes = x.shape[:dim] + x.shape[dim + 1 :]
    if target.shape != (without_classes if are_classes else x.shape):
        return NO_RULE
    if target.dtype is not torch.int64 if are_classes else ignore_index >= 0:
        return NO_RULE
    terms = _Terms(x, dim, as_whole(weight))
    if are_classes:
        losses, norm = terms.of_classes(target, ignore_index, label_smoothing)
    else:
        losses = terms.of_probabilities(target, label_smoothing)
        norm = torch.tensor(without_classes.numel(), device=losses.device)
    if reduction != "none":
        losses = losses.sum() / (norm if reduction == "mean" else 1)
    return losses.to(terms.result_dtype)


class _Terms:
    """Sums over all classes, for each sample.

    Attributes:
        result_dtype: The dtype of PyTorch's result.
    """

    def __init__(self, x: SplitTensor, dim: int, weight: torch.Tensor | None) -> None:
        local = x.local
        is_autocast = torch.is_autocast_enabled(local.device.type)
        computed = torch.promote_types(local.dtype, torch.float32)  # as PyTorch's kernels do
        self.result_dtype = computed if is_autocast else local.dtype
        self.local, self.dim, self.axis = local.to(computed), dim, x.axis
        self.classes = x.shape[dim]
        self.whole_weight = None if weight is None else weight.to(computed)
        self.weight: torch.Tensor | None = None
        if self.whole_weight is not None:
            own = piece_at(self.whole_weight, 0, x.division, x.axis)
            self.weight = own.view(-1, *(1,) * (x.dim() - 1 - dim))
        largest = self.local.detach().amax(dim)
        self.largest = torch.stack(x.axis.pieces(largest)).amax(0)

    def _sums(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logarithm of the sum of exponentials, and sums of the ranks' parts."""
        exponentials = (self.local - self.largest.unsqueeze(self.dim)).exp().sum(self.dim)
        sums, *others = total(torch.stack([exponentials, *parts]), self.axis).unbind()
        return sums.log() + self.largest, *others

    def of_classes(
        self, target: torch.Tensor, ignored: int, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each sample, and by what a mean divides their sum."""
        is_used = target != ignored
        is_wrong = is_used & ((target < 0) | (target >= self.classes))
        if target.device.type == "cpu" and bool(is_wrong.any()):
            wrong = int(target[is_wrong][0])
            raise IndexError(f"Target {wrong} is out of bounds ({self.classes} classes)")
        own = target - self.axis.rank * self.local.shape[self.dim]
        is_own = is_used & (own >= 0) & (own < self.local.shape[self.dim])
        index = own.where(is_own, 0).unsqueeze(self.dim)
        picked = self.local.gather(self.dim, index).squeeze(self.dim).where(is_own, 0)
        weight: Any = 1.0
        if self.whole_weight is not None:
            weight = self.whole_weight[target.where(is_used & ~is_wrong, 0)]
        if smoothing:
            weighted = self.local if self.weight is None else self.local * self.weight
            logarithm, chosen, spread = self._sums(picked, weighted.sum(self.dim))
            whole = self.classes if self.whole_weight is None else self.whole_weight.sum()
            spread = logarithm * whole - spread
        else:
            (logarithm, chosen), spread = self._sums(picked), torch.zeros(())
        losses = (logarithm - chosen) * weight
        if smoothing:
            losses = losses * (1 - smoothing) + spread * (smoothing / self.classes)
        losses = losses.where(is_used, 0).masked_fill(is_wrong, float("nan"))
        return losses, (torch.ones_like(losses) * weight).where(is_used, 0).sum()

    def of_probabilities(self, target: torch.Tensor, smoothing: float) -> torch.Tensor:
        """Return the loss of each sample."""
        wanted = target.to(self.local.dtype)
        if smoothing:
            wanted = wanted * (1 - smoothing) + smoothing / self.classes
        own = piece_at(wanted, self.dim, Split(self.dim), self.axis)
        own = own if self.weight is None else own * self.weight
        parts = (own * self.local).sum(self.dim), own.sum(self.dim)
        logarithm, product, mass = self._sums(*parts)
        return logarithm * mass - product
