"""Places of a run's ranks along the axes of its mesh, for messages and labels."""

from collections.abc import Iterable

from .read_record import Record


def mesh_places(records: Iterable[Record]) -> dict[int, dict[str, int]]:
    """Return the position of each rank along each axis; {} where samples are the only axis."""
    found = {}
    for record in records:
        mesh = record.meta.get("mesh")
        if mesh is not None and len(mesh["axes"]) > 1:
            names = [axis for axis, _ in mesh["axes"]]
            found[record.rank] = dict(zip(names, mesh["place"], strict=True))
    return found
