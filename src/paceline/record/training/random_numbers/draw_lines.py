"""Find the line of the user's code that draws random numbers, by looking after each line."""

import sys
from collections.abc import Hashable
from types import FrameType
from typing import Any

from ..generators import generator_states
from ..user_lines import is_users_file, line_of

MAX_EVENTS = 5000  # lines that are looked at


class DrawLines:
    """The lines that draw, by place.

    At each place the lines are found once, in an occurrence after the first one that drew. There
    the generators' states are compared after each executed line. A debugger or a coverage tool
    that traces lines already prevents it.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[str, str]] = {}  # line by generator
        self._done: set[Hashable] = set()
        self._place: Hashable = None
        self._states: dict[str, int] = {}
        self._line, self._events = "", 0
        self._frames: list[FrameType] = []

    def line(self, place: Hashable, generator: str) -> str:
        """Return the line that draws at a place, or ""."""
        return self._found.get(place, {}).get(generator, "")

    def start(self, place: Hashable) -> None:
        """Begin to look at a place, if its lines are not known yet."""
        if place in self._done or self._place is not None or sys.gettrace() is not None:
            return
        self._done.add(place)
        self._place, self._states, self._events = place, generator_states(), 0
        self._line = ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if is_users_file(frame.f_code.co_filename):
                self._line = self._line or line_of(frame)
                frame.f_trace = self._in_frame
                self._frames.append(frame)
            frame = frame.f_back
        sys.settrace(self._on_call)

    def skip(self) -> None:
        """Ignore what was drawn since the last line."""
        if self._place is not None:
            self._states = generator_states()

    def stop(self) -> None:
        """End to look."""
        if self._place is None:
            return
        sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        self._frames.clear()
        self._compare()
        self._place = None

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not is_users_file(frame.f_code.co_filename):
            return None
        self._compare()  # the caller may have drawn for its arguments
        self._line = line_of(frame)
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return") and self._place is not None:
            self._compare()
            self._line = line_of(frame)
            self._events += 1
            if self._events > MAX_EVENTS:
                self.stop()
                return None
        return self._in_frame

    def _compare(self) -> None:
        states = generator_states()
        found = self._found.setdefault(self._place, {})
        for name, state in states.items():
            if self._line and self._states.get(name, state) != state:
                found.setdefault(name, self._line)
        self._states = states
