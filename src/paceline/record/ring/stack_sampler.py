"""Sampler of the main thread's position in the script, and detector of stalls of the process.

Time that no hook covers is reported as ``other``; the sampled lines show what the script did in
it. A sample is an event whose amount is the number of a line; its peer is 1 if that line, or a
calling line of the script, requests the next item of an iterator. The lines are stored in a file
next to the ring, one JSON object per line.

If the sampler wakes up late, either no thread of the process could run, or another thread held the
global interpreter lock. The latter uses CPU time. A late sampler therefore writes an event that
the rank was stalled, if the process used little CPU time meanwhile.
"""

import dis
import json
import linecache
import os
import sys
import sysconfig
import threading
import time
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

from ...security.files import open_regular
from .core_wait import OtherCoreWait
from .launcher_messages import notify
from .memory_sampler import MemorySampler
from .recorder import Recorder, now
from .ring import LINES_SUFFIX
from .states import State

# Line numbers of frames that are in the middle of an instruction


def frame_line(frame: FrameType) -> int:
    """Return the line that ``frame`` executes, see ``code_line``."""
    return code_line(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def code_line(code: CodeType, offset: int) -> int:
    """Return the line of the instruction at ``offset``.

    The jump to a loop's next iteration after an ``if`` that was false has no line (CPython 3.11),
    and is where a thread that computes in Python is mostly seen: there it gives up the
    interpreter's lock. Its line is that of the ``if``, from which it is reached. ``frame.f_lineno``
    is None there.
    """
    before = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number:
            return number
        if start <= offset:
            before = number or before
    for instruction in dis.get_instructions(code):
        if instruction.opcode in _JUMPS and instruction.argval == offset and instruction.positions:
            return instruction.positions.lineno or before
    return before


_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)


SAMPLE_INTERVAL_S = 0.15
MIN_STALL_S = 0.5  # delay of the sampler; longer than a wait for a core on a busy host
_IDLE = 0.2  # CPU time as a share of the delay; a process that computes uses more
_BEFORE = 0.3  # additional share at most, for CPU time used before the stall began
_PACKAGE = str(Path(__file__).resolve().parents[2])
# Packages may lie outside of the virtual environment: in a module of the cluster, or the system's.
_SITES = tuple(
    dict.fromkeys(
        path.rstrip(os.sep) + os.sep
        for path in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path)
        if path.rstrip(os.sep).endswith("-packages")
    )
)
LIBRARY_PREFIXES = (sysconfig.get_path("stdlib") + os.sep, *_SITES, _PACKAGE, "<")


def is_script(code: CodeType) -> bool:
    """Return whether code is of the script, and of no library."""
    return not code.co_filename.startswith(LIBRARY_PREFIXES)


def script_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the script's code, from a frame on; None if there is none."""
    while frame is not None and not is_script(frame.f_code):
        frame = frame.f_back
    return frame


class StackSampler:
    """Background thread that samples the main thread's stack."""

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
        try:
            self._sample()
        except Exception as error:  # must not print a stack between the script's output
            notify(f"warning: Paceline's stack sampler failed and is off: {error}\n")

    def _sample(self) -> None:
        gap, memory = StallDetector(), MemorySampler(self.recorder)
        core_wait = OtherCoreWait(self.recorder)
        while not self._end.wait(SAMPLE_INTERVAL_S):
            at, began = now(), time.thread_time_ns()  # excludes the wait for the GIL
            frame = sys._current_frames().get(self._main or 0)
            if frame is not None and self.recorder.path is not None:
                number, iterates = self._look(frame)
                self.recorder.event(State.SAMPLE, at, at, amount=number, peer=int(iterates))
            del frame
            if since := gap.stood_still(at):
                self.recorder.event(State.STILL, since, at)
            memory.sample(at)
            core_wait.sample(at)
            self.recorder.extra_cost_ns += time.thread_time_ns() - began
            gap.begins()

    def _look(self, frame: FrameType) -> tuple[int, bool]:
        """Return the number of the innermost line of the script on the stack.

        Also return whether any line of the script on the stack requests the next item of an
        iterator.
        """
        own: FrameType | None = None
        iterates = False
        at: FrameType | None = frame
        while at is not None:
            if is_script(at.f_code):
                own = own or at
                code = linecache.getline(at.f_code.co_filename, frame_line(at)).strip()
                iterates |= code.startswith(("for ", "async for ")) or "next(" in code
            at = at.f_back
        own = own or frame
        inside = "" if own is frame else _library(frame, own)
        line = frame_line(own)
        place = (own.f_code.co_filename, line, inside)
        if place not in self._lines:
            self._lines[place] = len(self._lines) + 1
            self._tell(self._lines[place], own, line, inside)
        return self._lines[place], iterates

    def _tell(self, number: int, frame: FrameType, line: int, inside: str) -> None:
        path = self.recorder.path
        assert path is not None
        file = frame.f_code.co_filename
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
                path.with_suffix(LINES_SUFFIX), flags, follow_links=False, owner=os.geteuid()
            )
            with open(fd, "a") as lines:
                lines.write(json.dumps(known) + "\n")
        except OSError:
            pass  # the job's folder was removed, so this process will end soon, too


class StallDetector:
    """Detector of late samples: each is due ``SAMPLE_INTERVAL_S`` after the previous one."""

    def __init__(self) -> None:
        self._used, self._usual = time.process_time_ns(), 0
        self.begins()

    def begins(self) -> None:
        self._due = now() + int(SAMPLE_INTERVAL_S * 1e9)

    def stood_still(self, at: int) -> int:
        """Return when the stall began that ended at ``at`` (both in ns), or 0 without a stall.

        A stall is a delay of at least ``MIN_STALL_S`` in which the process used little CPU time.
        """
        used, before = time.process_time_ns(), self._used
        self._used = used
        late, took = at - self._due, used - before
        if late < MIN_STALL_S * 1e9:
            self._usual = took
            return 0
        return self._due if took < _IDLE * late + min(self._usual, _BEFORE * late) else 0


def _library(frame: FrameType, own: FrameType) -> str:
    """Return module.function of the library code that ``own`` called.

    This is the innermost frame of an installed package other than torch and Paceline, or else the
    innermost frame outside of Paceline; "" if that is ``own``.
    """
    at: FrameType | None = frame
    innermost = ""
    while at is not None and at is not own:
        name = str(at.f_globals.get("__name__", ""))
        function = f"{name}.{at.f_code.co_name}"
        if not name.startswith("paceline."):
            if at.f_code.co_filename.startswith(_SITES) and not name.startswith("torch."):
                return function
            innermost = innermost or function
        at = at.f_back
    return innermost
