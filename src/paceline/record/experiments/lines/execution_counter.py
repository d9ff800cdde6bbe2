"""Count how often lines of chosen functions are executed in one step.

A line that runs thousands of times in a step, a few microseconds each, is a Python loop, whatever
operators it calls. Counting slows these functions down, so it is done in a step that is not
measured.
"""

import sys
from types import FrameType
from typing import Any

from .activity import Place, function_name

MAX_COUNTED = 200_000  # executions; then counting ends, which bounds what it costs


class ExecutionCounter:
    """Counter of executed lines in the calling thread, from start() to stop().

    Args:
        functions: File and qualified name of each function to count.
    """

    def __init__(self, functions: set[tuple[str, str]]) -> None:
        self.counts: dict[Place, int] = {}
        self._functions, self._total = functions, 0
        self._is_on = False

    def start(self) -> None:
        """Begin to count, unless a debugger or a coverage tool traces the thread."""
        if not self._functions or sys.gettrace() is not None:
            return
        self._is_on = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # functions that run already
            if (frame.f_code.co_filename, function_name(frame.f_code)) in self._functions:
                frame.f_trace = self._count
            frame = frame.f_back
        sys.settrace(self._enter)

    def stop(self) -> None:
        if self._is_on:
            self._is_on = False
            if getattr(sys.gettrace(), "__self__", None) is self:
                sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if (code.co_filename, function_name(code)) not in self._functions:
            return None
        return self._count(frame, "line", arg)

    def _count(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._is_on:
            frame.f_trace = None
            return None
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno, function_name(frame.f_code))
            self.counts[place] = self.counts.get(place, 0) + 1
            self._total += 1
            if self._total >= MAX_COUNTED:
                self.stop()
        return self._count
