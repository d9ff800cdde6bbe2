"""What datasets that are not packed have in common."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ...plurals import counted
from ..format.meta_schema import ArraySpec
from ..sources.source import Source


class UnpackedDataset(ABC):
    """Dataset of the samples of a source.

    A pickled dataset consists of its arguments: each process opens the source again.

    Attributes:
        label: dtype and shape of a label; None without labels.
    """

    _name: ClassVar[str]  # for messages
    _arguments: tuple[str, str | None, bool]
    _source: Source
    label: ArraySpec | None

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

    @abstractmethod
    def read(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """Return (array or bytes, label) of a sample."""
