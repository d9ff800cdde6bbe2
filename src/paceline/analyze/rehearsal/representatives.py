"""Which ranks of a job are rehearsed: those that may differ in shapes, memory or calls."""

from collections.abc import Sequence

from .facts import place_of, rank_at

MAX_ALL = 4  # ranks of a job that are all rehearsed
STAGE = "stage"


def representatives(size: int, axes: Sequence[tuple[str, int]]) -> list[int]:
    """Return ranks of a job in their order.

    With a mesh: of each stage the first rank; along each other axis the second one (which has
    neighbours on both sides, where there are three or more) and the last one; the last rank of all.
    Without a mesh: the first two ranks, the middle one and the last one.

    Args:
        size: Number of ranks.
        axes: Extents of the mesh; empty if it is not known.
    """
    if size <= MAX_ALL:
        return list(range(size))
    if not axes:
        return sorted({0, 1, size // 2, size - 1})
    origin = place_of(0, axes)
    found = [0]
    for axis, extent in axes:
        positions = range(extent) if axis == STAGE else sorted({min(1, extent - 1), extent - 1})
        found += [rank_at({**origin, axis: at}, axes) for at in positions]
    found.append(size - 1)
    return sorted(set(found))
