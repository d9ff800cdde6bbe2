"""Which rows of a dim each rank holds, and which rows of the input a window of the output needs.

A *row* is an index along one divided dim: a row of pixels for the height, a column for the width.

| padded coordinate | source row of ``n`` rows |
| --- | --- |
| 0 to n - 1 | itself |
| outside, "constant" | none: the value of the padding |
| outside, "replicate" | 0 or n - 1 |
| outside, "reflect" | mirrored at 0 or n - 1, which do not repeat |
| outside, "circular" | modulo n |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

Rows = tuple[int, int]  # first row, and the one after the last
FROM_END = {"depth": 3, "height": 2, "width": 1}  # place of the dim, of positions


@dataclass(frozen=True)
class Partition:
    """How the rows of one dim lie on the ranks of one axis of the mesh.

    Attributes:
        axis: "depth", "height" or "width".
        bounds: Of each rank its first row, and at last the number of rows. Parts can be empty.
    """

    axis: str
    bounds: tuple[int, ...]

    @classmethod
    def even(cls, axis: str, rows: int, ranks: int) -> "Partition":
        """Return parts that differ by one row at most."""
        return cls(axis, tuple(rows * rank // ranks for rank in range(ranks + 1)))

    @property
    def rows(self) -> int:
        """Number of rows of all ranks."""
        return self.bounds[-1]

    @property
    def ranks(self) -> int:
        """Number of ranks along the axis."""
        return len(self.bounds) - 1

    def part(self, rank: int) -> Rows:
        """Return the rows of a rank."""
        return self.bounds[rank], self.bounds[rank + 1]

    def parts(self) -> list[Rows]:
        """Return the rows of each rank."""
        return [self.part(rank) for rank in range(self.ranks)]

    def scaled(self, rows: int) -> "Partition":
        """Return a partition of another number of rows with about the same borders."""
        if rows == self.rows:
            return self
        old = max(self.rows, 1)
        return Partition(self.axis, tuple((2 * b * rows + old) // (2 * old) for b in self.bounds))

    def padded(self, before: int, after: int) -> "Partition":
        """Return the partition of ``before + rows + after`` rows that moves no row.

        Negative numbers cut rows off.
        """
        rows = self.rows + before + after
        inner = (min(max(b + before, 0), rows) for b in self.bounds[1:-1])
        return Partition(self.axis, (0, *inner, rows))


@dataclass(frozen=True)
class Window:
    """What a rank reads along one dim to compute its rows of the output.

    Attributes:
        needed: Segments of the input in ascending order, without gaps inside a segment.
        before: Rows of padding before them.
        after: Rows of padding after them.
        order: For "reflect", "replicate" and "circular": the row of the segments, joined, that each
            row of the window is. None: the rows as they are, between the padding.
    """

    needed: tuple[Rows, ...]
    before: int
    after: int
    order: tuple[int, ...] | None = None


def window(first: int, end: int, rows: int, mode: str = "constant") -> Window:
    """Return what the padded coordinates from ``first`` to before ``end`` are.

    Args:
        rows: Number of rows of the input.
        mode: As for ``torch.nn.functional.pad``.
    """
    if end <= first or (rows == 0 and mode != "constant"):
        return Window((), 0, 0)
    inner = (min(max(first, 0), rows), min(max(end, 0), rows))
    if mode == "constant" or inner == (first, end):
        length = max(inner[1] - inner[0], 0)
        before = min(max(-first, 0), end - first)
        needed = (inner,) if length else ()
        return Window(needed, before, end - first - before - length)
    source = [source_row(at, rows, mode) for at in range(first, end)]
    kept = sorted(set(source))
    place = {row: number for number, row in enumerate(kept)}
    return Window(tuple(segments(kept)), 0, 0, tuple(place[row] for row in source))


def source_row(at: int, rows: int, mode: str) -> int:
    """Return the row that a padded coordinate shows."""
    if mode == "circular":
        return at % rows
    if mode == "replicate":
        return min(max(at, 0), rows - 1)
    assert mode == "reflect", mode
    return -at if at < 0 else 2 * (rows - 1) - at if at >= rows else at


def segments(rows: Sequence[int]) -> Iterable[Rows]:
    """Yield the runs of ascending rows."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[start], rows[i - 1] + 1
            start = i


def windows_of(
    part: Rows, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[int, int]:
    """Return the padded coordinates that the rows ``part`` of an output read: first, end."""
    first, end = part
    if end <= first:
        return 0, 0
    return first * stride - padding, (end - 1) * stride - padding + dilation * (kernel - 1) + 1


def reshaped_parts(
    old: Sequence[int], new: Sequence[int], dim: int, partition: Partition
) -> tuple[int, Partition] | None:
    """Return the dim of a new shape that a divided dim becomes, with its partition.

    None if the rows of a rank are not a range of one dim of the new shape, or lie in samples
    (dim 0) or features [samples, features].
    """
    before, after = prod(old[:dim]), prod(old[dim + 1 :])
    same: list[tuple[int, Partition]] = []
    for place, extent in enumerate(new):
        inner = prod(new[place + 1 :])
        if prod(new[:place]) != before or not inner:
            continue
        if extent == partition.rows:
            return place, partition
        if place and len(new) > 2 and not any(bound * after % inner for bound in partition.bounds):
            bounds = tuple(bound * after // inner for bound in partition.bounds)
            same.append((place, Partition(partition.axis, bounds)))
    return max(same, key=lambda found: new[found[0]], default=None)
