"""Steps over a rank's connections in C (wire.c), called through ctypes, which releases the GIL."""

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from ..shared.c_kernel import load_library
from ..shared.collective_calls import CollectiveCall
from .schedules import Step

LIBRARY_PATH = Path(__file__).parent / "wire.so"
CLOSED, SILENT, DIFFERS, BROKEN, NO_MEMORY = 1, 2, 3, 4, 5

Program = Any  # an array of c_int64


@cache
def library() -> ctypes.CDLL:
    """Load the compiled library and declare its functions.

    Raises OSError where it was not built (no compiler at the installation).
    """
    signatures = {
        "open": (c_void_p, c_int, c_int, POINTER(c_int), c_void_p),
        "close": (None, c_void_p),
        "said": (None, c_void_p, POINTER(c_uint64)),
        "run": (c_int, c_void_p, POINTER(c_int64), c_void_p, POINTER(c_uint64), c_double),
    }
    return load_library(LIBRARY_PATH, "paceline_wire_", signatures)


class StepError(Exception):
    """A step over the connections failed.

    reason: CLOSED or one of the codes after it. host: index of the host it failed with. peer_call:
    the collective that the peer calls, for DIFFERS.
    """

    def __init__(self, reason: int, host: int, peer_call: CollectiveCall | None = None) -> None:
        super().__init__(reason, host)
        self.reason, self.host, self.peer_call = reason, host, peer_call


def encode_program(steps: Iterable[Step]) -> Program:
    """Return the steps in the encoding of paceline_wire_run."""
    words: list[int] = []
    for step in steps:
        words += [len(step.sends), len(step.receives), int(step.fold)]
        for host, place, nbytes in (*step.sends, *step.receives):
            words += [host, place, nbytes]
    return (c_int64 * (len(words) + 1))(*words, -1)


class Wire:
    """Runs steps over one rank's connections to other hosts.

    fds: descriptors of the connections, by host. broken_address: of the word that is not 0 once the
    ranks of this host have given up.
    """

    def __init__(self, hosts: int, me: int, fds: dict[int, int], broken_address: int) -> None:
        self._library, self._wire = library(), None
        descriptors = (c_int * hosts)(*(fds.get(host, -1) for host in range(hosts)))
        self._wire = self._library.paceline_wire_open(hosts, me, descriptors, broken_address)
        if not self._wire:
            raise OSError(ctypes.get_errno(), "no memory for the connections")

    def run(self, steps: Program, address: int, call: CollectiveCall, timeout: float) -> None:
        """Run a program. Offsets count from ``address``; timeout: seconds.

        Raises StepError.
        """
        call_words = (c_uint64 * 5)(call.op, call.dtype, call.reduction, call.root, call.nbytes)
        error = self._library.paceline_wire_run(self._wire, steps, address, call_words, timeout)
        if not error:
            return
        reason, host = error & 0xFF, error >> 8
        if reason == DIFFERS:
            peer_words = (c_uint64 * 5)()
            self._library.paceline_wire_said(self._wire, peer_words)
            raise StepError(reason, host, CollectiveCall(*map(int, peer_words)))
        raise StepError(reason, host)

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire:
            self._library.paceline_wire_close(wire)
