"""Find the lines of the user's code that change a state: it is compared after each line."""

import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

from .user_lines import is_users_file, line_of, users_frames

States = Mapping[str, Any]


class LineTracer:
    """Compares a state after each executed line of the user's code.

    A debugger or a coverage tool that traces lines already prevents it.

    Args:
        states: Returns the parts of the state by name. A part that is not there did not change.
        changed: Called with the name of a part, the line that has changed it, and the line of the
            function in which the tracer was started that ran then.
        max_events: Lines that are looked at between ``start`` and ``stop``.
    """

    def __init__(
        self,
        states: Callable[[], States],
        changed: Callable[[str, str, str], None],
        max_events: int,
    ) -> None:
        self._states, self._changed, self._max_events = states, changed, max_events
        self._last: States = {}
        self._line = self._site = ""
        self._code: CodeType | None = None  # of the function in which the tracer was started
        self._frames: list[FrameType] = []
        self.is_running = False
        self.events = 0  # since the last start

    def start(self) -> bool:
        """Begin to look; return whether this was possible."""
        if self.is_running or sys.gettrace() is not None:
            return False
        self.is_running, self.events = True, 0
        self._last, self._line, self._code = self._states(), "", None
        for frame in users_frames():
            self._line = self._line or line_of(frame)
            self._code = self._code or frame.f_code
            frame.f_trace = self._in_frame
            self._frames.append(frame)
        self._site = self._line
        sys.settrace(self._on_call)
        return True

    def stop(self) -> None:
        """End to look, after a last comparison."""
        if not self.is_running:
            return
        sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        self._frames.clear()
        self._compare()
        self.is_running = False

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not is_users_file(frame.f_code.co_filename):
            return None
        self._compare()  # the caller may have changed it for its arguments
        self._line = line_of(frame)
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return") and self.is_running:
            self._compare()
            running = users_frames(frame if event == "line" else frame.f_back)
            self._line = next(map(line_of, running), self._line)
            if frame.f_code is self._code:
                self._site = self._line
            self.events += 1
            if self.events > self._max_events:
                self.stop()
                return None
        return self._in_frame

    def _compare(self) -> None:
        states = self._states()
        for name, state in states.items():
            if self._line and self._last.get(name, state) != state:
                self._changed(name, self._line, self._site)
        self._last = states
