"""Format numbers, sizes and times for people."""

import math
from collections.abc import Iterable
from typing import Any

from ..cost.machine.units import size as size
from ..plurals import counted as counted
from ..plurals import ordinal as ordinal


def percent(share: float) -> str:
    """Format a share: 0.123 as "12.3 %"."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Format a duration in seconds: 0.0123 as "12.3 ms"."""
    if seconds >= 36_000:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds < 1e-9:  # less than a record can tell
        return "0 ms"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"


def signed_duration(seconds: float) -> str:
    """Format a difference of durations in seconds: "+12.3 ms", "-2 s", "0 ms"."""
    sign = "" if abs(seconds) < 1e-9 else "+" if seconds > 0 else "-"
    return f"{sign}{duration(abs(seconds))}"


def amount(value: float) -> str:
    """Format an amount, or a rate: 12345.6 as "12,346", 12.34 as "12.3", 0.0123 as "0.0123"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figure(value: float) -> str:
    """Format a table's figure: 12,346, 12.3, 0.123 or 0.00123; never 0 for another number."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if value == 0 or 0.1 <= value < 10 else f"{value:.3g}"


def elapsed(seconds: float) -> str:
    """Format an elapsed time in seconds: 3.2 s, 45 s, 12 min 3 s, 3 h 4 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def joined(parts: Iterable[str]) -> str:
    """Return the parts as an enumeration, such as "a, b and c"."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def of_group(group: str | None) -> str:
    """Return " of group NAME"; "" for the group of all ranks."""
    return "" if group in (None, "0", "default_pg") else f" of group {group}"


def finite(value: Any) -> Any:
    """Return a tree of values with None for numbers that are not finite, which JSON has not."""
    if isinstance(value, dict):
        return {key: finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [finite(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
