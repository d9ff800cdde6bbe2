"""Halos of layouts that divide samples, by layer."""

from dataclasses import dataclass

from ..records.read_record import Record


@dataclass(frozen=True)
class HaloLayer:
    """The halos of one layer, in forward and backward.

    Attributes:
        exchanges: Number of exchanges of a rank.
        bytes: What all ranks have received.
        exposed: Share of the ranks' time, since their first halo, in which they waited for halos.
    """

    name: str
    exchanges: int
    bytes: int
    exposed: float


def halo_layers(records: list[Record]) -> list[HaloLayer]:
    """Return the layers, those with most exposed time first."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    seconds = 0.0
    for record in records:
        halos = record.meta.get("halos")
        if halos is not None:
            seconds += halos["seconds"]
            for name, *totals in halos["layers"]:
                found.setdefault(name, []).append((totals[0], totals[1], totals[2]))
    layers = [
        HaloLayer(
            name,
            max(count for count, _, _ in of),
            sum(size for _, size, _ in of),
            sum(exposed for _, _, exposed in of) / seconds if seconds else 0.0,
        )
        for name, of in found.items()
    ]
    return sorted(layers, key=lambda one: -one.exposed)
