"""NumPy arrays or tensors in memory, as a dataset for Loader."""

from typing import Any

import numpy as np
import torch

from ...plurals import counted
from ..format.shard_format import ArraySpec
from ..shards import RaggedError


class ArrayDataset:
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
        """Return the number of classes: the largest label + 1."""
        assert self.y is not None
        return int(self.y.max()) + 1

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        """Return dtype and shape of the samples and of the labels."""
        return ArraySpec(self.x.dtype.name, self.x.shape[1:]), self.label

    def read(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """Return (array, label) of a sample; the array is a copy."""
        return self.x[i].copy(), None if self.y is None else self.y[i]

    def read_part(self, i: int, part: Any, label_part: Any) -> tuple[Any, Any]:
        """Return parts of a sample and of its label, as copies; None for a part: all of it."""
        array = self.x[(i, *(part or ()))].copy()
        return array, None if self.y is None else np.array(self.y[(i, *(label_part or ()))])

    def read_into(self, i: int, arrays: Any, labels: Any, k: int, scratch: Any) -> None:
        """Copy a sample to ``arrays[k]`` and its label to ``labels[k]``.

        Raises:
            RaggedError: The dtype or shape of the sample differs from that of the batch.
        """
        if self.x.shape[1:] != arrays.shape[1:] or self.x.dtype != arrays.dtype:
            raise RaggedError(i, self.spec_of(i)[0])
        arrays[k] = self.x[i]
        if self.y is not None:
            labels[k] = self.y[i]

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
