"""The result of one knob in a rank."""

import functools
import os
from typing import Any, ClassVar

from ..observe.attach import update_header
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

        @functools.wraps(getattr(module, name))
        def passed_over(*_: Any) -> None:
            self.overrides(f"{module.__name__}.{name}")

        setattr(module, name, passed_over)

    def _tell(self) -> None:
        how = {"how": self.how} if self.how else {}
        self.all[self.name] = {"set": self.set, "why_not": self.why_not, **how}
        update_header(knobs=self.all)

    def _say(self, text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            notify(f"paceline: {text}\n")
