"""What the step-time scripts measure with."""

import itertools
import json
import time
from pathlib import Path


class Stopwatch:
    """Microseconds from one iteration's start to the next, on ``time.monotonic_ns()``."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.skip, self.enough = warmup, warmup + steps + 1
        self.stamps: list[int] = []

    def start(self) -> bool:
        """An iteration starts; whether it is one too many."""
        self.stamps.append(time.monotonic_ns())
        return len(self.stamps) >= self.enough

    def write(self, path: str) -> None:
        stamps = self.stamps[self.skip :]
        times = [(b - a) / 1000 for a, b in itertools.pairwise(stamps)]
        Path(path).write_text(json.dumps(times))
