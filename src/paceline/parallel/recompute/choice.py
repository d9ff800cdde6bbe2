"""Choose which blocks recompute their activations, so that the activations fit a budget.

PyTorch's own choice (``torch.distributed._tools.sac_ilp``) needs the package pulp. The problem is
small: each block has a few ways, and their bytes add up. A dynamic programme over the blocks, in
the order of forward, solves it.
"""

from collections.abc import Sequence
from typing import NamedTuple

GRID_CELLS = 4096  # bytes are rounded up to this fraction of the budget


class Way(NamedTuple):
    """One way to run a block.

    Attributes:
        kept: Bytes kept from forward to backward.
        again: Bytes that are added during its backward, recomputed or copied from the host.
        cost: Seconds of recomputation, or of copies to the host and back.
    """

    name: str
    kept: int
    again: int
    cost: float


class Choice(NamedTuple):
    """The ways of all blocks, in the order of forward, and the seconds they recompute."""

    names: tuple[str, ...]
    cost: float


def peak_bytes(ways: Sequence[Way]) -> int:
    """Return the largest sum of the blocks' activations during forward and backward.

    When a block runs its backward, those after it have released their activations.
    """
    kept = peak = 0
    for way in ways:
        kept += way.kept
        peak = max(peak, kept + way.again)
    return peak


def least_bytes(blocks: Sequence[Sequence[Way]]) -> int:
    """Return the smallest peak of any choice."""
    low, high = 0, peak_bytes([ways[0] for ways in blocks])
    high = max(high, sum(max(way.kept + way.again for way in ways) for ways in blocks))
    while low < high:
        middle = (low + high) // 2
        if _fits(blocks, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(blocks: Sequence[Sequence[Way]], budget: int) -> bool:
    kept = 0
    for ways in blocks:
        fitting = [way.kept for way in ways if kept + way.kept + way.again <= budget]
        if not fitting:
            return False
        kept += min(fitting)
    return True


def choose_ways(blocks: Sequence[Sequence[Way]], budget: int) -> Choice | None:
    """Return the choice with the least recomputation whose peak is at most ``budget`` bytes.

    Returns:
        None if no choice fits.
    """
    cell = max(budget // GRID_CELLS, 1)
    # kept bytes, rounded up: the cheapest choice that keeps so many, and its bytes
    states: dict[int, tuple[float, int, tuple[str, ...]]] = {0: (0.0, 0, ())}
    for ways in blocks:
        following: dict[int, tuple[float, int, tuple[str, ...]]] = {}
        for cost, kept, names in states.values():
            for way in ways:
                total = kept + way.kept
                if total + way.again > budget:
                    continue
                entry = (cost + way.cost, total, (*names, way.name))
                key = -(-total // cell)
                if key not in following or entry < following[key]:
                    following[key] = entry
        states = _without_dominated(following)
    if not states:
        # Two choices in one cell: the cheaper one may keep some bytes too many for what follows.
        return _least_choice(blocks, budget)
    cost, _, names = min(states.values())
    return Choice(names, cost)


def _least_choice(blocks: Sequence[Sequence[Way]], budget: int) -> Choice | None:
    kept, cost, names = 0, 0.0, []
    for ways in blocks:
        fitting = [way for way in ways if kept + way.kept + way.again <= budget]
        if not fitting:
            return None
        way = min(fitting, key=lambda way: (way.kept, way.cost))
        kept, cost = kept + way.kept, cost + way.cost
        names.append(way.name)
    return Choice(tuple(names), cost)


def _without_dominated(
    states: dict[int, tuple[float, int, tuple[str, ...]]],
) -> dict[int, tuple[float, int, tuple[str, ...]]]:
    """Return the states without those that cost no less than one that keeps fewer bytes."""
    found: dict[int, tuple[float, int, tuple[str, ...]]] = {}
    cheapest = float("inf")
    for key in sorted(states):
        if states[key][0] < cheapest:
            cheapest = states[key][0]
            found[key] = states[key]
    return found
