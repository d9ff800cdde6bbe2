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


def axes_of_groups(records: Iterable[Record]) -> dict[str, str]:
    """Return the axes of each process group of a mesh by its name: "tensor (data 0) #3"."""
    labels: dict[str, str] = {}
    for record in records:
        own = record.meta.get("mesh", {}).get("groups", {})
        labels |= {f"{label} #{name}": label.partition(" (")[0] for name, label in own.items()}
    return labels
