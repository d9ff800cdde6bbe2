"""The time budget of runs."""

import time
from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(frozen=True)
class Deadline:
    """A point in time at which a command's runs, or a part of them, end.

    Attributes:
        at_s: On the clock of ``time.monotonic``.
    """

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Return the deadline that many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds left; 0 after the deadline."""
        return max(self.at_s - time.monotonic(), 0.0)

    def part(self, share: float) -> "Deadline":
        """Return the deadline after this share of the time that is left."""
        return Deadline.after(share * self.left_s)
