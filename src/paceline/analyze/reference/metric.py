"""Where the values of a metric come from, and at which value a training is good enough.

Imported by the launcher: needs no numpy.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

BACKWARD, LOGGED, PATTERN = "backward", "log", "pattern"


@dataclass(frozen=True)
class Metric:
    """Where the values come from.

    Attributes:
        source: BACKWARD (the loss of each backward), LOGGED (a value of ``world.log``) or PATTERN
            (lines of the output that match a regular expression).
        name: Name of the value, or the regular expression; "" for BACKWARD.
    """

    source: str = BACKWARD
    name: str = ""

    def __str__(self) -> str:
        if self.source == BACKWARD:
            return "the loss of each backward"
        if self.source == LOGGED:
            return f"{self.name!r} of world.log"
        return f"the lines that match {self.name!r}"


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_GOAL = re.compile(r"\s*([A-Za-z_]\w*)?\s*(>=|<=|>|<)\s*(\S+)\s*")


@dataclass(frozen=True)
class Goal:
    """A metric, a comparison and a limit, as in accuracy>=0.97.

    Attributes:
        name: Name of the metric; "" if only ``--metric`` names it.
        comparison: ">=", "<=", ">" or "<".
        limit: Finite number.
    """

    name: str
    comparison: str
    limit: float

    def __str__(self) -> str:
        return f"{self.name or 'metric'}{self.comparison}{self.limit:g}"

    @property
    def is_rising(self) -> bool:
        """Whether larger values are better."""
        return self.comparison.startswith(">")

    def is_reached(self, value: float) -> bool:
        """Whether a value meets the goal; nan never does."""
        return _COMPARISONS[self.comparison](value, self.limit)

    def best(self, values: Iterable[float]) -> float | None:
        """Return the value that is nearest to the goal, or beyond it; None without a number."""
        numbers = [value for value in values if not math.isnan(value)]
        if not numbers:
            return None
        return max(numbers) if self.is_rising else min(numbers)


def parse_goal(text: str, metric: str | None = None) -> Goal:
    """Return the goal of ``--until``.

    Args:
        text: Value of ``--until``.
        metric: Value of ``--metric``, or None: the name in ``text`` names the metric.

    Raises:
        ValueError: It is no comparison with a finite number, or no metric is named.
    """
    match = _GOAL.fullmatch(text)
    try:
        limit = float(match[3]) if match else math.nan
    except ValueError:
        limit = math.nan
    if match is None or not math.isfinite(limit):
        raise ValueError(
            f"--until {text!r} is no comparison of a metric with a number. HINT: "
            "--until 'accuracy>=0.97' for a value of world.log"
        )
    if not match[1] and metric is None:
        raise ValueError(
            f"--until {text!r} names no metric. HINT: --until 'accuracy{match[2]}{match[3]}' for a "
            "value of world.log, or --metric with a regular expression for lines of the output"
        )
    return Goal(match[1] or "", match[2], limit)
