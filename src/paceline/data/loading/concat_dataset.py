"""Several sets as one: first all samples of the first, then those of the second ..."""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from ..format.shard_format import ArraySpec


class ConcatDataset:
    """sets: of one kind, with labels of one kind. How often each is drawn is a sampler's matter
    (samplers.Weighted.mixed). Raises ValueError where the sets don't go together."""

    def __init__(self, sets: list[Any]) -> None:
        self.sets = sets
        self._ends = list(accumulate(map(len, sets)))
        first = sets[0]
        for other in sets[1:]:
            if (other.images, other.label) != (first.images, first.label):
                raise ValueError(
                    f"Loader: {first!r} and {other!r} don't go together: one has {_told(first)}, "
                    f"the other {_told(other)}. HINT: sets of one kind, with labels of one kind"
                )
        self.images: bool = first.images
        self.label: ArraySpec | None = first.label

    def __len__(self) -> int:
        return self._ends[-1]

    def __repr__(self) -> str:
        return f"{len(self.sets)} sets: {len(self):,} samples"

    def __getitem__(self, i: int) -> Any:
        own, j = self.location(i)
        return own[j]

    @property
    def classes(self) -> int:
        """As many as the set with the most has."""
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
        """The set that a sample is in, and its number there."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        at = bisect_right(self._ends, i)
        return self.sets[at], i - (self._ends[at - 1] if at else 0)


def _told(one: Any) -> str:
    kind = "images" if one.images else "arrays"
    label = f"{one.label.dtype} of {one.label.shape}" if one.label else "none"
    return f"{kind} (labels: {label})"
