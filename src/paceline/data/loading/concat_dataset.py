"""Concatenation of several datasets, in the given order."""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from ...plurals import counted
from ..format.meta_schema import ArraySpec


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
        own, j = self.location(i)
        return own[j]

    @property
    def classes(self) -> int:
        """Return the largest number of classes of any of the datasets."""
        return int(max(one.classes for one in self.sets))

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        own, j = self.location(i)
        found: tuple[ArraySpec, ArraySpec | None] = own.spec_of(j)
        return found

    def read(self, i: int, scratch: Any) -> tuple[Any, Any]:
        own, j = self.location(i)
        found: tuple[Any, Any] = own.read(j, scratch)
        return found

    def read_into(self, i: int, arrays: Any, labels: Any, k: int, scratch: Any) -> None:
        own, j = self.location(i)
        own.read_into(j, arrays, labels, k, scratch)

    def location(self, i: int) -> tuple[Any, int]:
        """Return the dataset that contains a sample, and the number of the sample in it.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        at = bisect_right(self._ends, i)
        return self.sets[at], i - (self._ends[at - 1] if at else 0)


def _describe(one: Any) -> str:
    kind = "images" if one.images else "arrays"
    label = f"{one.label.dtype} of {one.label.shape}" if one.label else "none"
    return f"{kind} (labels: {label})"
