"""The interval between checkpoints: epochs, optimizer steps or time."""

import re
from dataclasses import dataclass

_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class CheckpointInterval:
    """Interval between two checkpoints. ``unit`` is "epoch", "step" or "second"."""

    number: float
    unit: str

    @classmethod
    def parse(cls, text: str | int) -> "CheckpointInterval":
        """Parse "epoch", "2 epochs", 500 or "500 steps", "30s", "10min" or "1h".

        Raises ValueError for anything else.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)?\s*([a-z]*)\s*", str(text))
        number, unit = match.groups() if match else (None, "")
        unit = {"": "step" if number else "", "epochs": "epoch", "steps": "step"}.get(unit, unit)
        value = float(number) if number else 1.0
        if value > 0 and unit in _SECONDS:
            return cls(value * _SECONDS[unit], "second")
        if value >= 1 and value == int(value) and unit in ("epoch", "step"):
            return cls(value, unit)
        raise ValueError(
            f"world.epochs: every must be a number of epochs, steps or a time; this is {text!r}. "
            "HINT: every='epoch', '2 epochs', 500 (steps), '30s', '10min' or '1h'"
        )
