"""Cost of collectives by the formulas of docs/reference/measures.md: latencies and bytes."""

import math
from dataclasses import dataclass

RINGS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")


@dataclass(frozen=True)
class CollectiveTerms:
    """Factors of the two terms of a collective's duration: ``latencies`` a + ``vectors`` n b.

    n is the size of the whole vector in bytes, a the latency in s, b the time per byte in s.
    """

    latencies: float
    vectors: float

    def seconds(self, latency_s: float, seconds_per_byte: float, nbytes: float) -> float:
        """Return the predicted duration of one call."""
        return self.latencies * latency_s + self.vectors * nbytes * seconds_per_byte


def collective_terms(kind: str, ranks: int) -> CollectiveTerms:
    """Return the terms of a collective among ``ranks`` members.

    All-reduce, reduce-scatter, all-gather and all-to-all by a ring; broadcast, reduce, gather and
    scatter by a tree whose root sends or receives the vector; a barrier has latencies only. Names
    as in the report ("all-reduce"). Unknown kinds, such as messages, take one latency and one
    vector.
    """
    p = ranks
    if p < 2:
        return CollectiveTerms(0.0, 0.0)
    if kind == "all-reduce":
        return CollectiveTerms(2 * (p - 1), 2 * (p - 1) / p)
    if kind in RINGS:
        return CollectiveTerms(p - 1, (p - 1) / p)
    if kind in ("broadcast", "reduce"):
        return CollectiveTerms(math.log2(p), math.log2(p))
    if kind in ("gather", "scatter"):
        return CollectiveTerms(math.log2(p), (p - 1) / p)
    if kind == "barrier":
        return CollectiveTerms(2 * math.log2(p), 0.0)
    return CollectiveTerms(1.0, 1.0)


def bus_factor(kind: str, ranks: int) -> float | None:
    """Return the bus bandwidth over the algorithm bandwidth, as in nccl-tests.

    It is the bytes that cross a link, per byte of the whole vector. None if ``kind`` has none.
    """
    return collective_terms(kind, ranks).vectors if kind in RINGS else None
