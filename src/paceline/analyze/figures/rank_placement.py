"""What the headers of records say: where each rank ran, its loader, and halos by layer."""

from dataclasses import dataclass
from typing import Any, cast

from ...plurals import format_ranges
from ..records.read_record import Record

VERSIONS = ("paceline", "torch", "python")


@dataclass(frozen=True)
class RankPlacement:
    """Ranks with the same placement on one host. None: not in the record (before version 3)."""

    host: str
    ranks: str  # as "0-3,8"
    cores: str | None  # that a rank's process may run on
    threads: int | None  # torch's, of a rank
    device: str | None
    paceline: str | None
    torch: str | None
    python: str | None


def rank_placements(records: list[Record]) -> list[RankPlacement]:
    """Return one entry for all ranks of a host that agree in every field."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for record in records:
        meta = record.meta
        device = " ".join(str(meta[name]) for name in ("device", "devices") if name in meta)
        key: tuple[object, ...] = (
            record.host,
            _cores(meta.get("cores")),
            meta.get("threads"),
            device or None,
        )
        key += tuple(meta.get(name) for name in VERSIONS)
        alike.setdefault(key, []).append(record.rank)
    return [
        RankPlacement(str(host), format_ranges(ranks), *cast(Any, rest))
        for (host, *rest), ranks in alike.items()
    ]


def _cores(mask: object) -> str | None:
    """Return the hexadecimal mask of the kernel as "0-3,8"; None if it is no mask."""
    try:
        bits = int(str(mask), 16)
    except ValueError:
        return None
    return format_ranges([core for core in range(bits.bit_length()) if bits >> core & 1])


@dataclass(frozen=True)
class LoaderTotals:
    """Totals of the loaders.

    Attributes:
        workers: Of one rank.
        cores: Cores kept busy while training read from the loader, mean of the ranks.
        most: The same, of the rank where it is largest.
        left_out: Samples that could not be read.
    """

    workers: int
    processes: bool
    cores: float
    most: float
    rank: int
    left_out: int


def loader_totals(records: list[Record]) -> LoaderTotals | None:
    """Return the totals, or None where no rank has a loader."""
    loaders: list[tuple[int, dict[str, Any]]] = [
        (record.rank, record.meta["loader"]) for record in records if "loader" in record.meta
    ]
    if not loaders:
        return None
    busy_cores = [
        (loader["busy_s"] / max(loader["seconds"], 1e-9), rank) for rank, loader in loaders
    ]
    most, rank = max(busy_cores)
    return LoaderTotals(
        workers=max(int(loader["workers"]) for _, loader in loaders),
        processes=any(loader["processes"] for _, loader in loaders),
        cores=sum(cores for cores, _ in busy_cores) / len(busy_cores),
        most=most,
        rank=rank,
        left_out=sum(int(loader["left_out"]) for _, loader in loaders),
    )


# Halos of layouts that divide samples, by layer.


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
