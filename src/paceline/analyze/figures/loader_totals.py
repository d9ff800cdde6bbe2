"""Sum up the work of the ranks' loaders (paceline.data.Loader)."""

from dataclasses import dataclass
from typing import Any

from ..records.read_record import Record


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
