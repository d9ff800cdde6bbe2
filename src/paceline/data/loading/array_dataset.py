"""Samples that are in memory already: numpy arrays or tensors, as a dataset of Loader's."""

from typing import Any

import numpy as np
import torch

from ..format.shard_format import ArraySpec
from ..shards import RaggedError


class ArrayDataset:
    """``x`` and, where there is one, ``y``: arrays or CPU tensors whose first dim is the sample.
    Raises ValueError where their lengths differ."""

    images = False

    def __init__(self, x: Any, y: Any = None) -> None:
        self.x = _array(x)
        self.y = None if y is None else _array(y)
        if self.y is not None and len(self.x) != len(self.y):
            raise ValueError(
                f"Loader: {len(self.x):,} samples and {len(self.y):,} labels. HINT: as many of each"
            )

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return f"Arrays({self.x.dtype} {self.x.shape})"

    def __getitem__(self, i: int) -> Any:
        return self.x[i] if self.y is None else (self.x[i], self.y[i])

    @property
    def label(self) -> ArraySpec | None:
        return None if self.y is None else ArraySpec(self.y.dtype.name, self.y.shape[1:])

    @property
    def classes(self) -> int:
        """How many whole numbers there are from 0 to the largest label."""
        assert self.y is not None
        return int(self.y.max()) + 1

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        """What each sample and label is."""
        return ArraySpec(self.x.dtype.name, self.x.shape[1:]), self.label

    def read(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """(array, label), copies."""
        return self.x[i].copy(), None if self.y is None else self.y[i]

    def read_into(self, i: int, arrays: Any, labels: Any, k: int, scratch: Any) -> None:
        """A sample to ``arrays[k]``, its label to ``labels[k]``."""
        if self.x.shape[1:] != arrays.shape[1:] or self.x.dtype != arrays.dtype:
            raise RaggedError(i, self.spec_of(i)[0])
        arrays[k] = self.x[i]
        if self.y is not None:
            labels[k] = self.y[i]

    def take(self, chosen: list[int], arrays: Any, labels: Any, first: int) -> None:
        """Samples to ``arrays[first:]``, their labels to ``labels[first:]``."""
        end = first + len(chosen)
        # "clip" spares a buffer; no index is outside of the samples
        np.take(self.x, chosen, axis=0, out=arrays[first:end], mode="clip")
        if self.y is not None:
            np.take(self.y, chosen, axis=0, out=labels[first:end], mode="clip")


def _array(given: Any) -> np.ndarray[Any, Any]:
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu":
            raise ValueError(f"Loader: a tensor on {given.device}. HINT: tensor.cpu()")
        return given.detach().numpy()
    array = np.asarray(given)
    if array.ndim < 1 or array.dtype.hasobject:
        raise ValueError(
            f"Loader: {type(given).__name__} of {array.dtype} is no array of samples. "
            "HINT: a folder of paceline pack, or numpy arrays or tensors of numbers"
        )
    return array
