"""Where the values of a metric come from. Imported by the launcher: needs no numpy."""

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
