"""Open what a user gives to a Loader: its dataset, and the sampler of its order."""

import os
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ...plurals import counted
from ..format.meta_schema import ArraySpec
from ..sampling.samplers import BLOCK_BYTES, BlockShuffled, Ordered, Shuffled
from ..sampling.shard_loader import SampleDivision
from ..shards import RaggedError, Shards
from .file_dataset import Files
from .stored_arrays import StoredArrays, is_stored_array
from .unpacked_dataset import SampleDataset

Slices = tuple[slice, ...]


class PartDataset(SampleDataset):
    """Dataset of one part of each sample, and of each label that has the same positions.

    HDF5, netCDF and zarr arrays, arrays in memory, and packed datasets that are not compressed are
    read as hyperslabs; of other datasets a sample is read whole, and cut.

    Args:
        dataset: The whole samples [channels, positions ...], all of the shape of the first one.
        division: The part of this rank.

    Attributes:
        shapes: Of a whole sample, and of a whole label; None: it is not divided.
    """

    images = False

    def __init__(self, dataset: Any, division: SampleDivision) -> None:
        self._dataset, self._division = dataset, division
        array, label = dataset.spec_of(0)
        self._array, self.label = array, label
        self._cut = division.cut(tuple(array.shape))
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

    def view(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """Return the parts of a sample and of its label, as copies."""
        if hasattr(self._dataset, "read_part"):
            spec, _ = self._dataset.spec_of(i)
            if spec != self._array:
                raise RaggedError(i, spec)
            if hasattr(self._dataset, "check_sample") and self._division.checks(i):
                self._dataset.check_sample(i, scratch)
            found: tuple[Any, Any] = self._dataset.read_part(i, self._cut, self._label_cut)
            return found
        array, label = self._dataset.read(i, scratch)
        if array.shape != self._array.shape or array.dtype != self._array.dtype:
            raise RaggedError(i, ArraySpec.of(array))
        return part(array, self._cut), part(label, self._label_cut)


def part(array: Any, slices: Slices | None) -> Any:
    """Return a copy of a part of an array; the array itself if it is not divided."""
    return array if slices is None else np.array(array[slices])


def _spec(array: ArraySpec, slices: Slices | None) -> ArraySpec:
    if slices is None:
        return array
    shape = tuple(len(range(*part.indices(n))) for part, n in zip(slices, array.shape, strict=True))
    return ArraySpec(array.dtype, shape)


class ArrayDataset(SampleDataset):
    """Dataset of samples ``x`` and optional labels ``y``, arrays or CPU tensors.

    The first dimension of both is the sample.

    Raises:
        ValueError: The lengths of ``x`` and ``y`` differ, or one of them is not a numeric array.
    """

    images = False

    def __init__(self, x: Any, y: Any = None) -> None:
        self.x = _array(x)
        self.y = None if y is None else _array(y)
        if self.y is not None and len(self.x) != len(self.y):
            raise ValueError(
                f"Loader: x has {counted(len(self.x), 'sample')}, but y has "
                f"{counted(len(self.y), 'label')}. HINT: pass one label per sample"
            )
        self.label = None if self.y is None else ArraySpec(self.y.dtype.name, self.y.shape[1:])

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return f"Arrays({self.x.dtype} {self.x.shape})"

    def __getitem__(self, i: int) -> Any:
        return self.x[i] if self.y is None else (self.x[i], self.y[i])

    @property
    def classes(self) -> int:
        """Return the number of classes: the largest label + 1."""
        assert self.y is not None
        return int(self.y.max()) + 1

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        """Return dtype and shape of the samples and of the labels."""
        return ArraySpec(self.x.dtype.name, self.x.shape[1:]), self.label

    def view(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """Return (array, label) of a sample; the array is a view."""
        return self.x[i], None if self.y is None else self.y[i]

    def read_part(self, i: int, part: Any, label_part: Any) -> tuple[Any, Any]:
        """Return parts of a sample and of its label, as copies; None for a part: all of it."""
        array = self.x[(i, *(part or ()))].copy()
        return array, None if self.y is None else np.array(self.y[(i, *(label_part or ()))])

    def take(self, chosen: list[int], arrays: Any, labels: Any, first: int) -> None:
        """Copy samples to ``arrays[first:]`` and their labels to ``labels[first:]``."""
        end = first + len(chosen)
        # mode="clip" avoids a buffer; no index is out of range
        np.take(self.x, chosen, axis=0, out=arrays[first:end], mode="clip")
        if self.y is not None:
            np.take(self.y, chosen, axis=0, out=labels[first:end], mode="clip")


def _array(given: Any) -> np.ndarray[Any, Any]:
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu":
            raise ValueError(
                f"Loader: tensors must be on the CPU; this one is on {given.device}. HINT: "
                "tensor.cpu()"
            )
        return given.detach().numpy()
    array = np.asarray(given)
    if array.ndim < 1 or array.dtype.hasobject:
        raise ValueError(
            f"Loader: {type(given).__name__} of {array.dtype} is not an array of samples. "
            "HINT: pass the folder of a packed dataset, or numeric NumPy arrays or tensors"
        )
    return array


class ConcatDataset:
    """Concatenation of datasets with the same kind of samples and of labels.

    To draw from the datasets with given proportions, use the sampler ``Weighted.mixed``.

    Args:
        sets: The datasets.

    Raises:
        ValueError: The kinds of samples or of labels differ.
    """

    def __init__(self, sets: list[Any]) -> None:
        self.sets = sets
        self._ends = list(accumulate(map(len, sets)))
        first = sets[0]
        for other in sets[1:]:
            if (other.images, other.label) != (first.images, first.label):
                raise ValueError(
                    f"Loader: {first!r} and {other!r} can't be concatenated: one has "
                    f"{_describe(first)}, the other {_describe(other)}. HINT: use datasets with "
                    "the same kind of samples and of labels"
                )
        self.images: bool = first.images
        self.label: ArraySpec | None = first.label

    def __len__(self) -> int:
        return self._ends[-1]

    def __repr__(self) -> str:
        return f"{counted(len(self.sets), 'dataset')}: {counted(len(self), 'sample')}"

    def __getitem__(self, i: int) -> Any:
        dataset, j = self.location(i)
        return dataset[j]

    @property
    def classes(self) -> int:
        """Return the largest number of classes of any of the datasets."""
        return int(max(dataset.classes for dataset in self.sets))

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        dataset, j = self.location(i)
        found: tuple[ArraySpec, ArraySpec | None] = dataset.spec_of(j)
        return found

    def read(self, i: int, scratch: Any) -> tuple[Any, Any]:
        dataset, j = self.location(i)
        found: tuple[Any, Any] = dataset.read(j, scratch)
        return found

    def read_into(self, i: int, arrays: Any, labels: Any, k: int, scratch: Any) -> None:
        dataset, j = self.location(i)
        dataset.read_into(j, arrays, labels, k, scratch)

    def location(self, i: int) -> tuple[Any, int]:
        """Return the dataset that contains a sample, and the number of the sample in it.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        at = bisect_right(self._ends, i)
        return self.sets[at], i - (self._ends[at - 1] if at else 0)


def _describe(dataset: Any) -> str:
    kind = "images" if dataset.images else "arrays"
    label = f"{dataset.label.dtype} of {dataset.label.shape}" if dataset.label else "none"
    return f"{kind} (labels: {label})"


def open_dataset(source: Any) -> Any:
    """Return the dataset of a source: a folder, files, arrays, or a list of sources.

    Raises:
        ValueError: The source is of another kind.
    """
    if is_stored_array(source):
        return StoredArrays(source)
    if isinstance(source, (str, os.PathLike)):
        return Shards(source)
    if isinstance(source, tuple) and len(source) == 2 and is_stored_array(source[0]):
        return StoredArrays(*source)
    if isinstance(source, (Shards, ArrayDataset, ConcatDataset, StoredArrays, Files)):
        return source
    if isinstance(source, list) and source:
        return ConcatDataset([open_dataset(part) for part in source])
    if isinstance(source, TensorDataset):
        source = source.tensors
    if isinstance(source, tuple) and len(source) in (1, 2):
        return ArrayDataset(*source)
    if isinstance(source, (np.ndarray, torch.Tensor)):
        return ArrayDataset(source)
    raise ValueError(
        f"Loader: {type(source).__name__} is not a source. HINT: pass a packed dataset's "
        "folder, an HDF5, netCDF or zarr file, or arrays x or (x, y). For other datasets use "
        "torch's DataLoader"
    )


def make_sampler(dataset: Any, shuffle: bool | str, seed: int) -> Ordered:
    """Return the sampler for ``Loader(shuffle=...)``.

    Raises:
        ValueError: ``shuffle`` is not True, False or "blocks".
    """
    if shuffle not in (True, False, "blocks"):
        raise ValueError(
            f"Loader: shuffle must be True, False or 'blocks'; this is {shuffle!r}. HINT: "
            "shuffle=True"
        )
    if shuffle == "blocks" and isinstance(dataset, Shards):
        each = max(dataset.meta.bytes / len(dataset), 1)
        return BlockShuffled(len(dataset), int(BLOCK_BYTES / each), seed)
    if shuffle == "blocks" and isinstance(dataset, StoredArrays):
        return dataset.in_blocks(seed)
    if shuffle and isinstance(dataset, StoredArrays):
        dataset.fights()
    return (Shuffled if shuffle else Ordered)(len(dataset), seed)
