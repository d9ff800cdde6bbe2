"""Mix-up (Zhang et al., arXiv 1710.09412): a sample is mixed with another of the set, and its label
is as well. Which one, and how much of it, depends on (seed, epoch, sample) alone, so that ranks and
batches of any number see the same."""

from typing import Any

import numpy as np

from ..format.shard_format import ArraySpec
from ..sampling.sample_order import derive_seed

Array = np.ndarray[Any, Any]
PARTNER = 0x6D69787570  # sets these draws apart from the transform's


class MixUp:
    """alpha: shares are drawn from Beta(alpha, alpha); the larger one is the sample's own, so that
    each is seen once an epoch. label: what labels are then, float32: a share of each class, or
    mixed numbers; None where there are none.

    Raises ValueError for an alpha that is not above 0, and labels that are neither.
    """

    def __init__(self, source: Any, alpha: float) -> None:
        if not alpha > 0:
            raise ValueError(f"Loader: mix_up={alpha}. HINT: above 0, as 0.2; None for none")
        self.alpha, self.samples = alpha, len(source)
        self.classes, kind = 0, source.label
        if kind is not None and not kind.shape and np.dtype(kind.dtype).kind in "iu":
            self.classes = source.classes
            kind = ArraySpec("float32", (self.classes,))
        elif kind is not None:
            kind = ArraySpec("float32", kind.shape)
        self.label: ArraySpec | None = kind

    def partner(self, seed: int, epoch: int, i: int) -> tuple[int, float]:
        """The other sample, and the share of the own one: 0.5 .. 1."""
        rng = np.random.Generator(np.random.Philox(key=derive_seed(seed, epoch, i, PARTNER)))
        share = float(rng.beta(self.alpha, self.alpha))
        return int(rng.integers(self.samples)), max(share, 1 - share)

    def mixed(
        self, one: tuple[Any, Any], other: tuple[Any, Any], share: float
    ) -> tuple[Array, Array | None]:
        """(array, label) of two, the arrays of one shape and dtype, which stays. Raises ValueError
        for what can't be mixed."""
        first, second = one[0], other[0]
        if first.dtype.kind not in "fciu":
            raise ValueError(f"Loader: mix_up of {first.dtype}. HINT: a transform to float32")
        kind = first.dtype.type if first.dtype.kind in "fc" else np.float32
        array = first * kind(share) + second * kind(1 - share)
        if first.dtype.kind in "iu":
            array = np.rint(array)
        array = array.astype(first.dtype, copy=False)
        if self.label is None:
            return array, None
        label = np.zeros(self.label.shape, np.float32)
        for (_, told), weight in ((one, share), (other, 1 - share)):
            if self.classes:
                if not 0 <= told < self.classes:
                    raise ValueError(f"Loader: mix_up of class {told}, of {self.classes}")
                label[int(told)] += weight
            else:
                label += np.float32(weight) * np.asarray(told, np.float32)
        return array, label
