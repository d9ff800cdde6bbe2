"""Types of knob values."""

from dataclasses import dataclass

from ..cost.layout import Layout


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


@dataclass(frozen=True)
class LayoutText:
    """A text of a layout."""

    def fits(self, value: object) -> bool:
        try:
            return isinstance(value, str) and bool(Layout.parse(value))
        except ValueError:
            return False

    def __str__(self) -> str:
        return "a layout, such as 'zero3' or 'data + recompute'"


@dataclass(frozen=True)
class ModuleNames:
    """Names of modules in one text, separated by commas."""

    def fits(self, value: object) -> bool:
        return isinstance(value, str) and all(name.strip() for name in value.split(","))

    def __str__(self) -> str:
        return "names of modules, such as 'layers.4, layers.9'"


ON = Switch()
