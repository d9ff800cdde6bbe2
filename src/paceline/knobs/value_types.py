"""Types of knob values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, inclusive; only integers if ``whole``."""

    low: float
    high: float
    whole: bool = True

    def fits(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return self.low <= value <= self.high and (isinstance(value, int) or not self.whole)

    def __str__(self) -> str:
        return f"a {'whole ' * self.whole}number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Switch:
    """The value True. To leave a knob off, omit it from the settings."""

    def fits(self, value: object) -> bool:
        return value is True

    def __str__(self) -> str:
        return "true"


@dataclass(frozen=True)
class Choice:
    """One of several strings."""

    words: tuple[str, ...]

    def fits(self, value: object) -> bool:
        return value in self.words

    def __str__(self) -> str:
        return " or ".join(repr(word) for word in self.words)


ON = Switch()
