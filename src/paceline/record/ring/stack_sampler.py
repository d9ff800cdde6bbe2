"""Where in the script the main thread is, a few times per second; and when nothing of it ran.

What no hook sees is ``other``; the lines say what it was. A sample is an event whose amount is
the number of a line (its peer is 1 where a ``for`` asks for its next there); the lines stand in
a file beside the ring, one JSON object each.

A sampler that wakes up late could not run: nothing of its process did, or another thread kept the
interpreter's lock. The latter takes processor time, so a late sampler that finds little of it used
writes that the rank stood still.
"""

import json
import linecache
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

from ...security.files import open_regular
from .recorder import Recorder, now
from .states import State

SAMPLE_INTERVAL_S = 0.15
MIN_STALL_S = 0.5  # s too late: longer than a busy host lets one wait
_IDLE = 0.2  # of the time that it was late: who computes takes more
_BEFORE = 0.3  # ... of it more at most, for what all threads used before they stood still
_PACKAGE = str(Path(__file__).resolve().parents[2])
LIBRARY_PREFIXES = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    *(_PACKAGE, "<"),
)


_SITES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))


class StackSampler:
    """Samples the main thread's stack from a thread of its own."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._lines: dict[tuple[str, int, str], int] = {}
        self._main = threading.main_thread().ident
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()

    def _run(self) -> None:
        gap = StallDetector()
        while not self._end.wait(SAMPLE_INTERVAL_S):
            at, began = now(), time.thread_time_ns()  # without the wait for the interpreter's lock
            frame = sys._current_frames().get(self._main or 0)
            if frame is not None and self.recorder.path is not None:
                number, iterates = self._look(frame)
                self.recorder.event(State.SAMPLE, at, at, amount=number, peer=int(iterates))
            del frame
            if since := gap.stood_still(at):
                self.recorder.event(State.STILL, since, at)
            self.recorder.extra_cost_ns += time.thread_time_ns() - began
            gap.begins()

    def _look(self, frame: FrameType) -> tuple[int, bool]:
        """The number of the innermost line that is the script's own, and whether any of its
        lines that are being executed asks an iterator for its next."""
        own: FrameType | None = None
        iterates = False
        at: FrameType | None = frame
        while at is not None:
            if not at.f_code.co_filename.startswith(LIBRARY_PREFIXES):
                own = own or at
                code = linecache.getline(at.f_code.co_filename, at.f_lineno).strip()
                iterates |= code.startswith(("for ", "async for ")) or "next(" in code
            at = at.f_back
        own = own or frame
        inside = "" if own is frame else _library(frame, own)
        place = (own.f_code.co_filename, own.f_lineno, inside)
        if place not in self._lines:
            self._lines[place] = len(self._lines) + 1
            self._tell(self._lines[place], own, inside)
        return self._lines[place], iterates

    def _tell(self, number: int, frame: FrameType, inside: str) -> None:
        path = self.recorder.path
        assert path is not None
        file, line = frame.f_code.co_filename, frame.f_lineno
        known = {
            "number": number,
            "file": file,
            "line": line,
            "function": frame.f_code.co_name,
            "inside": inside,
            "code": linecache.getline(file, line).strip()[:120],
        }
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            fd = open_regular(
                path.with_suffix(".lines"), flags, follow_links=False, owner=os.geteuid()
            )
            with open(fd, "a") as lines:
                lines.write(json.dumps(known) + "\n")
        except OSError:
            pass  # the job's folder has gone: so will this process


class StallDetector:
    """The time from one look to the next, which is ``SECONDS`` where the sampler can run."""

    def __init__(self) -> None:
        self._used, self._usual = time.process_time_ns(), 0
        self.begins()

    def begins(self) -> None:
        self._due = now() + int(SAMPLE_INTERVAL_S * 1e9)

    def stood_still(self, at: int) -> int:
        """Since when (ns) nothing of the process ran, if the gap that is over ``at`` was too long
        for that reason, else 0."""
        used, before = time.process_time_ns(), self._used
        self._used = used
        late, took = at - self._due, used - before
        if late < MIN_STALL_S * 1e9:
            self._usual = took
            return 0
        return self._due if took < _IDLE * late + min(self._usual, _BEFORE * late) else 0


def _library(frame: FrameType, own: FrameType) -> str:
    """Where in a library that ``own`` called the rank was: module.function of the innermost
    frame that is neither Python's own nor torch's, or else of the innermost of all."""
    at: FrameType | None = frame
    while at is not None and at is not own:
        name = str(at.f_globals.get("__name__", ""))
        file = at.f_code.co_filename
        if file.startswith(_SITES) and not name.startswith(("torch.", "paceline.")):
            return f"{name}.{at.f_code.co_name}"
        at = at.f_back
    return f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"
