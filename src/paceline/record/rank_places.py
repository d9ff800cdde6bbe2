"""Places of the job's ranks along the axes of a mesh, for messages of hooks in this process.

``world.distribute`` sets them where a layout divides models. A rank's record and the launcher know
its own place.
"""

from collections.abc import Mapping

from ..plurals import Places, named_ranks, shared_place
from .ring.launcher_messages import send_to_launcher

_places: dict[int, Mapping[str, int]] = {}


def set_places(places: Places, rank: int) -> None:
    """Set the places of all ranks; ``rank`` is this one."""
    _places.clear()
    _places.update(places)
    if text := shared_place([rank], places):
        send_to_launcher(place=text)


def placed_ranks(ranks: list[int]) -> str:
    """Format ranks with the place that they share: "rank 5 (data 1, stage 0)"."""
    return named_ranks(ranks, places=_places)
