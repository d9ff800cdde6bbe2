"""What datasets that are not packed have in common."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from ...plurals import counted
from ..format.meta_schema import ArraySpec
from ..shards import RaggedError
from ..sources.source import Source


class SampleDataset(ABC):
    """Dataset of samples that are read one by one.

    Attributes:
        label: dtype and shape of a label; None without labels.
    """

    label: ArraySpec | None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def view(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """Return (array or bytes, label) of a sample; the array may belong to the dataset."""

    def read(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """Return (array or bytes, label) of a sample; the array is the caller's."""
        array, label = self.view(i, scratch)
        if isinstance(array, np.ndarray) and not (array.flags.owndata and array.flags.writeable):
            array = array.copy()
        return array, label

    def read_into(self, i: int, arrays: Any, labels: Any, k: int, scratch: Any) -> None:
        """Copy a sample to ``arrays[k]`` and its label to ``labels[k]``.

        Raises:
            RaggedError: The dtype or shape of the sample differs from that of the batch.
        """
        array, label = self.view(i, scratch)
        if array.shape != arrays.shape[1:] or array.dtype != arrays.dtype:
            raise RaggedError(i, ArraySpec.of(array))
        arrays[k] = array
        if self.label is not None:
            labels[k] = label


class UnpackedDataset(SampleDataset):
    """Dataset of the samples of a source.

    A pickled dataset consists of its arguments: each process opens the source again.
    """

    _name: ClassVar[str]  # for messages
    _arguments: tuple[str, str | None, bool]
    _source: Source

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:
        return f"{self._name}({self._arguments[0]!r}): {counted(len(self), 'sample')}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        array, label = self.read(i, None)
        return array if self.label is None else (array, label)
