"""Find the value of a metric in lines of a job's output."""

import re
from dataclasses import dataclass

MAX_LINE_CHARS = 10_000
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class MetricLine:
    """A line with a value; ``step`` and ``samples`` where the pattern names them."""

    value: float
    step: float | None = None
    samples: float | None = None


class MetricPattern:
    """The pattern of ``--metric``. ``text``: checked by ``request.parse_metric``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pattern = re.compile(text)
        names = self._pattern.groupindex
        self.has_steps = "step" in names
        others = set(range(1, self._pattern.groups + 1)) - set(names.values())
        self._value = names.get("value") or min(others)

    def find(self, line: str) -> MetricLine | None:
        """Return the values in a line, or None. Thousands separators are removed."""
        match = self._pattern.search(_COLOURS.sub("", line[:MAX_LINE_CHARS]))
        if match is None:
            return None
        value = _number(match[self._value])
        if value is None:
            return None
        groups = match.groupdict()
        return MetricLine(value, _number(groups.get("step")), _number(groups.get("samples")))


def _number(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text.replace(",", "").rstrip(".;:)]%"))
    except ValueError:
        return None
