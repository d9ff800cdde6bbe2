"""Labels written as text, in a CSV or in members of tars and LMDBs: classes or numbers."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...security.text import printable
from ..format.meta_schema import ArraySpec

# Not by int() and float(), which also read 1_0, and digits of other scripts.
INTEGER, DECIMAL, EXPONENT = "an integer", "a decimal number", "a number"
NOT_FINITE, WORD = "not finite", "a word"
PATTERNS = {
    INTEGER: re.compile(r"[+-]?[0-9]+"),
    DECIMAL: re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
    EXPONENT: re.compile(r"[+-]?[0-9]+[eE][+-]?[0-9]+"),
    NOT_FINITE: re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE),
}
SHOWN_CHARS = 20


@dataclass(frozen=True)
class TextLabels:
    """What the texts of all labels of a dataset mean.

    Attributes:
        label: "class", or float32.
        classes: Names of the classes, if labels are words.
        note: Remark for the user, or "".
    """

    label: ArraySpec | str
    classes: list[str] = field(default_factory=list)
    note: str = ""

    def value(self, text: str) -> Any:
        """Return the label of a text: a class's number, or a number.

        Raises:
            ValueError: The text is no label of this kind.
        """
        if isinstance(self.label, ArraySpec):
            return float32_label(text)
        if text in self._numbers:
            return self._numbers[text]
        if self.classes or not PATTERNS[INTEGER].fullmatch(text):
            raise ValueError(f"its label has changed: {_shown(text)}")
        return int(text)

    def __post_init__(self) -> None:
        numbers = {name: number for number, name in enumerate(self.classes)}
        object.__setattr__(self, "_numbers", numbers)

    _numbers: dict[str, int] = field(init=False, repr=False)


def interpret_labels(description: str, texts: Callable[[], Iterable[str]]) -> TextLabels:
    """Decide what labels are: integers are classes, other numbers are float32. If one is a word,
    all are names of classes.

    Args:
        description: Where the labels are, for messages.
        texts: Returns the text of each label, without spaces around it. Called up to twice.

    Raises:
        ValueError: Some are words, and others numbers with a decimal point.
    """
    found: dict[str, str] = {}
    for text in texts():
        found.setdefault(_kind(text), text)
    if WORD not in found and set(found) != {NOT_FINITE}:
        return TextLabels("class" if set(found) <= {INTEGER} else ArraySpec("float32", ()))
    word = _shown(found.get(WORD, ""))
    if DECIMAL in found:
        raise ValueError(
            f"{description}: the label {word} is a word, and {_shown(found[DECIMAL])} a number. "
            "HINT: use names or numbers of classes only, or numbers only"
        )
    others = [_shown(text) for kind, text in found.items() if kind != WORD]
    note = ""
    if others and WORD in found:
        note = (
            f"{description}: all labels are names of classes, also {', '.join(others)}, as {word} "
            "is not a number"
        )
    return TextLabels("class", sorted(set(texts())), note)


def float32_label(text: str) -> np.float32:
    """Return the number of a text.

    Raises:
        ValueError: float32 can't hold it: it becomes infinite, or another integer.
    """
    with np.errstate(over="ignore"):
        value = np.float32(float(text))
    finite = _kind(text) != NOT_FINITE
    if (finite and np.isinf(value)) or (_kind(text) == INTEGER and int(value) != int(text)):
        raise ValueError(
            f"its label {_shown(text)} does not fit into float32. HINT: use one column of classes, "
            "or a .npy of labels with a wider dtype"
        )
    return value


def _kind(text: str) -> str:
    return next((kind for kind, pattern in PATTERNS.items() if pattern.fullmatch(text)), WORD)


def _shown(text: str) -> str:
    return repr(printable(text[:SHOWN_CHARS]))
