"""Mix-up (Zhang et al., arXiv 1710.09412): mix each sample and its label with another sample.

The other sample and the mixing weight depend only on (seed, epoch, sample), so the result is the
same for any number of ranks and any batch size.
"""

from typing import Any

import numpy as np

from ..format.meta_schema import ArraySpec
from ..sampling.sample_order import derive_seed

Array = np.ndarray[Any, Any]
PARTNER = 0x6D69787570  # separates these random numbers from those of the transform


class MixUp:
    """Mix-up of the samples of a dataset.

    Weights are drawn from Beta(alpha, alpha). The larger weight is that of the sample itself, so
    that each sample is seen once per epoch.

    Args:
        source: The dataset.
        alpha: Parameter of the Beta distribution, above 0.

    Attributes:
        label: Dtype (float32) and shape of the mixed labels: the weight of each class, or the
            weighted mean of numeric labels. None without labels.

    Raises:
        ValueError: ``alpha`` is not above 0.
    """

    def __init__(self, source: Any, alpha: float) -> None:
        if not alpha > 0:
            raise ValueError(
                f"Loader: mix_up must be above 0; this is {alpha}. HINT: mix_up=0.2, or None"
            )
        self.alpha, self.samples = alpha, len(source)
        self.classes, kind = 0, source.label
        if kind is not None and not kind.shape and np.dtype(kind.dtype).kind in "iu":
            self.classes = source.classes
            kind = ArraySpec("float32", (self.classes,))
        elif kind is not None:
            kind = ArraySpec("float32", kind.shape)
        self.label: ArraySpec | None = kind

    def partner(self, seed: int, epoch: int, i: int) -> tuple[int, float]:
        """Return the number of the other sample, and the weight (0.5 to 1) of sample ``i``."""
        rng = np.random.Generator(np.random.Philox(key=derive_seed(seed, epoch, i, PARTNER)))
        share = float(rng.beta(self.alpha, self.alpha))
        return int(rng.integers(self.samples)), max(share, 1 - share)

    def mixed(
        self, sample: tuple[Any, Any], other: tuple[Any, Any], share: float
    ) -> tuple[Array, Array | None]:
        """Return (array, label), the weighted mean of two samples, in the dtype of the samples.

        Args:
            sample: Array and label of the first sample.
            other: Array and label of the second sample, of the same shape and dtype.
            share: Weight of the first sample.

        Raises:
            ValueError: The dtype of the samples is not numeric, or a class is out of range.
        """
        first, second = sample[0], other[0]
        if first.dtype.kind not in "fciu":
            raise ValueError(
                f"Loader: mix_up can't mix {first.dtype}. HINT: use a transform to float32"
            )
        kind = first.dtype.type if first.dtype.kind in "fc" else np.float32
        array = first * kind(share) + second * kind(1 - share)
        if first.dtype.kind in "iu":
            array = np.rint(array)
        array = array.astype(first.dtype, copy=False)
        if self.label is None:
            return array, None
        label = np.zeros(self.label.shape, np.float32)
        for (_, given), weight in ((sample, share), (other, 1 - share)):
            if self.classes:
                if not 0 <= given < self.classes:
                    raise ValueError(f"Loader: mix_up: class {given} is not below {self.classes}")
                label[int(given)] += weight
            else:
                label += np.float32(weight) * np.asarray(given, np.float32)
        return array, label
