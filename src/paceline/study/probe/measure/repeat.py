"""A call, timed again and again within a budget."""

import time
from collections.abc import Callable
from typing import Any

from ....cost.machine.machine_file import Figure


def repeated(
    call: Callable[[], Any], seconds: float, least: int = 5, most: int = 500
) -> list[float]:
    """Seconds of each repetition. The first one, which warms up, is left out."""
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
    """So much of something in each of those times."""
    return Figure.of([amount / seconds for seconds in times], unit)
