"""What the ranks' loaders (paceline.data.Loader) did beside the training."""

from dataclasses import dataclass
from typing import Any

from ..records.read_record import Record


@dataclass(frozen=True)
class Loading:
    """workers: of a rank. cores: that they kept busy while it was trained from them, in the mean of
    the ranks; most: of the rank where it was most. left_out: samples that could not be read."""

    workers: int
    processes: bool
    cores: float
    most: float
    rank: int
    left_out: int


def loading(records: list[Record]) -> Loading | None:
    """None where no loader has told."""
    told: list[tuple[int, dict[str, Any]]] = [
        (record.rank, record.meta["loader"]) for record in records if "loader" in record.meta
    ]
    if not told:
        return None
    each = [(one["busy_s"] / max(one["seconds"], 1e-9), rank) for rank, one in told]
    most, rank = max(each)
    return Loading(
        workers=max(int(one["workers"]) for _, one in told),
        processes=any(one["processes"] for _, one in told),
        cores=sum(cores for cores, _ in each) / len(each),
        most=most,
        rank=rank,
        left_out=sum(int(one["left_out"]) for _, one in told),
    )
