"""Repeated timing of a call within a time budget."""

import time
from collections.abc import Callable
from typing import Any

from ....cost.machine.machine_file import Figure


def repeat(call: Callable[[], Any], seconds: float, least: int = 5, most: int = 500) -> list[float]:
    """Return the seconds of each repetition, without a first call that warms up.

    Args:
        seconds: Time budget.
        least: Minimum number of repetitions, also beyond the budget.
        most: Maximum number of repetitions.
    """
    call()
    found: list[float] = []
    start = end = time.perf_counter()
    while len(found) < least or (end - start < seconds and len(found) < most):
        before = time.perf_counter()
        call()
        end = time.perf_counter()
        found.append(max(end - before, 1e-9))
    return found


def rate(amount: float, times: list[float], unit: str) -> Figure:
    """Return the rates of an amount that was processed in each of these times (seconds)."""
    return Figure.of([amount / seconds for seconds in times], unit)
