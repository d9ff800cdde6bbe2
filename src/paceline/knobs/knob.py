"""One knob: a setting, or an edit of the script, that may remove a cause of lost time.

``KnobResult`` is the result of one knob in a rank.
"""

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..cost.layout import Layout
from ..observe.attach import update_header
from ..record.hooks.taps import replace
from ..record.ring.launcher_messages import notify


class KnobResult:
    """The result of one knob in this rank, which is also written to the record's header."""

    all: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.set, self.overrode, self.why_not, self.how = False, False, "", ""

    def done(self, how: str = "") -> None:
        """Report once that the knob is set, and how, if there are several ways."""
        if not self.set or how not in ("", self.how):
            self.set, self.how = True, how or self.how
            self._tell()

    def not_done(self, why: str) -> None:
        """Report once that the knob cannot be set on this rank, and why."""
        if not self.why_not:
            self.why_not = why
            self._tell()
            self._say(f"{self.name} has no effect: {why}")

    def overrides(self, call: str) -> None:
        """Report once that the script's ``call`` is ignored."""
        if not self.overrode:
            self.overrode = True
            self._say(f"{self.name} is set, so the script's call of {call} is ignored")

    def passes_over(self, module: Any, name: str) -> None:
        """Ignore all later calls of a module's function by the script."""

        def passed_over(*_: Any) -> None:
            self.overrides(f"{module.__name__}.{name}")

        replace(module, name, lambda _: passed_over)

    def _tell(self) -> None:
        how = {"how": self.how} if self.how else {}
        self.all[self.name] = {"set": self.set, "why_not": self.why_not, **how}
        update_header(knobs=self.all)

    def _say(self, text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            notify(f"paceline: {text}\n")


_requests: dict[str, tuple[Any, KnobResult]] = {}  # by name of the knob


def request(value: Any, turned: KnobResult, why_unused: str = "") -> None:
    """Keep the value of a knob for the function of Paceline that asks for it with ``requested``.

    why_unused: Reported at the end of a script without an error, if no function has asked.
    """
    _requests[turned.name] = value, turned
    if why_unused:
        atexit.register(_report_unused, turned, why_unused)


def _report_unused(turned: KnobResult, why: str) -> None:
    if not turned.set and getattr(sys, "last_value", None) is None:
        turned.not_done(why)


def requested(name: str, how: str = "") -> Any:
    """Return the value that was requested for a knob, which then is set; None: as the script says.

    how: The way in which it is set, for the record.
    """
    if name not in _requests:
        return None
    value, turned = _requests[name]
    turned.done(how)
    return value


# Types of knob values.


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


COMPUTING = "computing"  # not a cause: applies if no cause limits the training
LADDER, RECORD, FORMULA = "the ladder", "the record", "a formula"  # sources of a prediction
ALL, HALF = 1.0, 0.5  # of the share of a cause


@dataclass(frozen=True)
class Share:
    """A knob saves a part of the share of its cause.

    Attributes:
        part: The part.
        source: What the share is known by, if no experiment measured it.
        is_limit: Whether the knob saves at most this part, and maybe nothing.
    """

    part: float
    source: str
    is_limit: bool = False


@dataclass(frozen=True)
class Tried:
    """What a knob saves is measured in a few steps, with a value that is always proposed."""

    value: Any = True


@dataclass(frozen=True)
class Knob:
    """One knob.

    Attributes:
        does: What the knob changes, for the user.
        answers: Ids of the causes in ``paceline diagnose`` that it may remove, or ``COMPUTING``.
        edit: The equivalent edit of the script.
        hook: Function that sets the knob in a rank, or its module:function under ``paceline`` if
            it is of a higher layer or imports torch; None if the script must be edited.
        value: Values that the knob accepts; None if the script must be edited.
        looks_for: Regular expression that finds the line of the script to edit.
        costs: Possible costs, for the user.
        numbers: Whether results change by more than the order of summation causes.
        effort: Work that the remedy needs, from 1 (one value) to 3 (a part of the script is
            rewritten, or the job needs other nodes).
        excludes: Names of knobs that cannot be set together with this one.
        saves: What it saves of a step; None if a function of predict/gains.py knows it, or if it
            is not proposed.
        is_edited_elsewhere: Whether the line to edit is another one than that in which the ranks
            lose the time.
    """

    does: str
    answers: tuple[str, ...]
    edit: str
    hook: Callable[[Any, KnobResult], None] | str | None = None
    value: Range | Switch | Choice | LayoutText | ModuleNames | None = None
    looks_for: str = ""
    costs: str = ""
    numbers: bool = False
    excludes: tuple[str, ...] = ()
    effort: int = 1
    saves: Share | Tried | None = None
    is_edited_elsewhere: bool = False
