"""Report where each rank ran, from its record: host, cores, threads, device and versions."""

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
