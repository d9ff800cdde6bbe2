"""Rates of hits in cases, with Wilson intervals."""

import math
from typing import Any

Z = 1.96  # 95 % intervals


def interval(hits: int, count: int) -> tuple[float, float]:
    """Return the Wilson interval of a rate."""
    if not count:
        return 0.0, 1.0
    rate, z2 = hits / count, Z * Z / count
    centre = (rate + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(rate * (1 - rate) / count + z2 / 4 / count) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def rate(hits: list[bool]) -> dict[str, Any]:
    low, high = interval(sum(hits), len(hits))
    return {"hits": sum(hits), "of": len(hits), "low": round(low, 3), "high": round(high, 3)}
