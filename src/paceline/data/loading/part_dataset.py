"""The parts of a dataset's samples that one of several ranks computes with."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..format.shard_format import ArraySpec
from ..shards import RaggedError

Slices = tuple[slice, ...]
Cut = Callable[[tuple[int, ...]], Slices | None]


class PartDataset:
    """Dataset of one part of each sample, and of each label that has the same positions.

    HDF5, netCDF and zarr arrays, and arrays in memory, are read as hyperslabs; of other datasets a
    sample is read whole, and cut.

    Args:
        dataset: The whole samples [channels, positions ...], all of the shape of the first one.
        cut: Return the part of an array of this shape; None if it has no positions to divide.

    Attributes:
        shapes: Of a whole sample, and of a whole label; None: it is not divided.
    """

    images = False

    def __init__(self, dataset: Any, cut: Cut) -> None:
        self._dataset = dataset
        array, label = dataset.spec_of(0)
        self._array, self.label = array, label
        self._cut = cut(tuple(array.shape))
        self._label_cut: Slices | None = None
        positions = tuple(array.shape[1:])
        if self._cut and label is not None and tuple(label.shape[-len(positions) :]) == positions:
            more = len(label.shape) - len(positions)
            self._label_cut = (slice(None),) * more + self._cut[1:]
            self.label = _spec(label, self._label_cut)
        self.shapes = (
            tuple(array.shape) if self._cut else None,
            tuple(label.shape) if self._label_cut and label is not None else None,
        )

    @property
    def is_divided(self) -> bool:
        """Whether the samples have positions to divide."""
        return self._cut is not None

    def __len__(self) -> int:
        return len(self._dataset)

    def __repr__(self) -> str:
        return repr(self._dataset)

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        """Return dtype and shape of the part of a sample, and of a label."""
        return _spec(self._array, self._cut), self.label

    def read(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """Return the parts of a sample and of its label, as copies."""
        if hasattr(self._dataset, "read_part"):
            found: tuple[Any, Any] = self._dataset.read_part(i, self._cut, self._label_cut)
            return found
        array, label = self._dataset.read(i, scratch)
        if array.shape != self._array.shape or array.dtype != self._array.dtype:
            raise RaggedError(i, ArraySpec(array.dtype.name, array.shape))
        return part(array, self._cut), part(label, self._label_cut)

    def read_into(self, i: int, arrays: Any, labels: Any, k: int, scratch: Any) -> None:
        """Copy the part of a sample to ``arrays[k]``, and that of its label to ``labels[k]``."""
        array, label = self.read(i, scratch)
        arrays[k] = array
        if labels is not None:
            labels[k] = label


def part(array: Any, slices: Slices | None) -> Any:
    """Return a copy of a part of an array; the array itself if it is not divided."""
    return array if slices is None else np.array(array[slices])


def _spec(array: ArraySpec, slices: Slices | None) -> ArraySpec:
    if slices is None:
        return array
    shape = tuple(len(range(*one.indices(n))) for one, n in zip(slices, array.shape, strict=True))
    return ArraySpec(array.dtype, shape)
