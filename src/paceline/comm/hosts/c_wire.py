"""Steps over a rank's connections, in C (wire.c), by ctypes: a call of it holds no lock of the
interpreter's."""

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from ..shared.collective_calls import Call
from .schedules import Step

LIBRARY = Path(__file__).parent / "wire.so"
CLOSED, SILENT, DIFFERS, BROKEN, NO_MEMORY = 1, 2, 3, 4, 5

Program = Any  # an array of c_int64


@cache
def library() -> ctypes.CDLL:
    """Raises OSError where it was not built (no compiler at the installation)."""
    found = ctypes.CDLL(str(LIBRARY), use_errno=True)
    words = {
        "open": (c_void_p, c_int, c_int, POINTER(c_int), c_void_p),
        "close": (None, c_void_p),
        "said": (None, c_void_p, POINTER(c_uint64)),
        "run": (c_int, c_void_p, POINTER(c_int64), c_void_p, POINTER(c_uint64), c_double),
    }
    for name, (result, *arguments) in words.items():
        function = getattr(found, f"paceline_wire_{name}")
        function.restype, function.argtypes = result, arguments
    return found


class StepError(Exception):
    """why: of CLOSED and those after it. host: with which; theirs: what that one does."""

    def __init__(self, why: int, host: int, theirs: Call | None = None) -> None:
        super().__init__(why, host)
        self.why, self.host, self.theirs = why, host, theirs


def program(steps: Iterable[Step], base: int = 0) -> Program:
    """As wire.c takes them. base: added to every place."""
    words: list[int] = []
    for step in steps:
        words += [len(step.sends), len(step.receives), int(step.fold)]
        for host, place, nbytes in (*step.sends, *step.receives):
            words += [host, base + place, nbytes]
    return (c_int64 * (len(words) + 1))(*words, -1)


class Wire:
    """fds: of the connections, by host. broken: address of the word that says that the ranks of
    this host have given up."""

    def __init__(self, hosts: int, me: int, fds: dict[int, int], broken: int) -> None:
        self._library, self._wire = library(), None
        each = (c_int * hosts)(*(fds.get(host, -1) for host in range(hosts)))
        self._wire = self._library.paceline_wire_open(hosts, me, each, broken)
        if not self._wire:
            raise OSError(ctypes.get_errno(), "no memory for the connections")

    def run(self, steps: Program, data: int, call: Call, timeout: float) -> None:
        """data: the address that places count from. Raises StepError."""
        said = (c_uint64 * 5)(call.op, call.kind, call.how, call.root, call.nbytes)
        error = self._library.paceline_wire_run(self._wire, steps, data, said, timeout)
        if not error:
            return
        why, host = error & 0xFF, error >> 8
        if why == DIFFERS:
            theirs = (c_uint64 * 5)()
            self._library.paceline_wire_said(self._wire, theirs)
            raise StepError(why, host, Call(*map(int, theirs)))
        raise StepError(why, host)

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire:
            self._library.paceline_wire_close(wire)
