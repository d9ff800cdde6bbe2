"""The kernel in C (kernel.c), by ctypes: a call of it holds no lock of the interpreter's."""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_double, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from .collective_calls import Call, ExchangeError, died, differ, silent

LIBRARY = Path(__file__).parent / "kernel.so"
DIED, SILENT, OUTSIDE = 1, 2, 4  # else ranks differ


@cache
def library() -> ctypes.CDLL:
    """Raises OSError where it was not built (no compiler at the installation)."""
    found = ctypes.CDLL(str(LIBRARY), use_errno=True)
    words = {
        "open": (c_void_p, c_int, c_int, c_int, c_size_t, c_int),
        "close": (None, c_void_p),
        "needs": (c_size_t, c_int, c_size_t),
        "hold": (c_int, c_int, c_int),
        "said": (None, c_void_p, POINTER(c_uint64)),
        "all_reduce": (c_int, c_void_p, c_void_p, c_uint64, c_int, c_int, c_double),
        "reduce_scatter": (
            *(c_int, c_void_p, POINTER(c_void_p), c_void_p),
            *(c_uint64, c_int, c_int, c_int, c_double),
        ),
        "reduce_parts": (
            *(c_int, c_void_p, c_void_p, c_uint64, c_uint64),
            *(c_int, c_int, c_int, c_double),
        ),
        "gather_parts": (c_int, c_void_p, c_void_p, c_uint64, c_uint64, c_double),
        "on_socket": (None, c_void_p, c_int, c_int),
        "sockets": (c_int, c_void_p),
        "by_socket": (None, c_void_p, c_int),
        "break": (None, c_void_p, c_int),
        "broken": (c_void_p, c_void_p),
        "all_gather": (c_int, c_void_p, c_void_p, POINTER(c_void_p), c_uint64, c_double),
        "broadcast": (c_int, c_void_p, c_void_p, c_uint64, c_int, c_double),
        "barrier": (c_int, c_void_p, c_double),
    }
    for name, (result, *arguments) in words.items():
        function = getattr(found, f"paceline_{name}")
        function.restype, function.argtypes = result, arguments
    return found


class Kernel:
    """One rank's side of a group, over the memory behind ``fd``, which is its own from now on and
    goes with it. Vectors are given by address and bytes; kind and how are
    positions in calls.KINDS and calls.HOWS; timeout: seconds. Raises ExchangeError. names: the
    numbers that the group's ranks have in the job."""

    @staticmethod
    def needs(size: int, slot: int) -> int:
        """Bytes of memory of a group."""
        return int(library().paceline_needs(size, slot))

    def __init__(self, fd: int, rank: int, size: int, slot: int, names: Sequence[int] = ()) -> None:
        self._library, self._fd, self._comm = library(), fd, None
        if self._library.paceline_hold(fd, rank):
            raise OSError(ctypes.get_errno(), "the lock of this rank's byte")
        self._comm = self._library.paceline_open(fd, rank, size, slot, 1)
        if not self._comm:
            raise OSError(ctypes.get_errno(), "the shared memory can't be mapped")
        self.rank, self.size, self.sockets = rank, size, 0
        self._names = list(names) or list(range(size))
        self._all_reduce = self._library.paceline_all_reduce

    def all_reduce(self, data: int, nbytes: int, kind: int, how: int, timeout: float) -> None:
        """The result is where the vector was."""
        error = self._all_reduce(self._comm, data, nbytes, kind, how, timeout)
        if error:
            self._raise(error, timeout)

    def reduce_scatter(
        self,
        sources: Sequence[int],
        to: int,
        nbytes: int,
        kind: int,
        how: int,
        timeout: float,
        by: int = 0,
    ) -> None:
        """sources: a vector of ``nbytes`` for each rank. by: what a mean is divided by, if not by
        the number of ranks."""
        each = (c_void_p * self.size)(*sources)
        call = self._library.paceline_reduce_scatter
        self._check(call(self._comm, each, to, nbytes, kind, how, by, timeout), timeout)

    def reduce_parts(
        self, data: int, nbytes: int, part: int, kind: int, how: int, by: int, timeout: float
    ) -> None:
        """Rank q's part, of ``part`` bytes from q * part on as far as the vector goes, becomes this
        host's sum, on that rank alone. by: what a mean is divided by."""
        call = self._library.paceline_reduce_parts
        self._check(call(self._comm, data, nbytes, part, kind, how, by, timeout), timeout)

    def gather_parts(self, data: int, nbytes: int, part: int, timeout: float) -> None:
        """All ranks get all parts."""
        call = self._library.paceline_gather_parts
        self._check(call(self._comm, data, nbytes, part, timeout), timeout)

    def on_socket(self, socket: int, wanted: bool) -> None:
        """Where this rank is, before all find_sockets(). wanted: whether it is told to sum up by
        sockets."""
        self._library.paceline_on_socket(self._comm, socket, wanted)

    def find_sockets(self) -> bool:
        """How many sockets the ranks are on, as ``sockets``: 0 unless there are several, and some
        with several ranks. Whether all ranks are told the same."""
        found = self._library.paceline_sockets(self._comm)
        self.sockets = max(found, 0)
        return bool(found >= 0)

    def by_socket(self, by: bool) -> None:
        """Ranks of a socket sum up first, from the next collective on; on all ranks, while nothing
        is under way. No effect where there are no sockets."""
        self._library.paceline_by_socket(self._comm, by)

    def give_up(self) -> None:
        """This rank can't reach other hosts any more: every rank of this one is told."""
        if self._comm:
            self._library.paceline_break(self._comm, self.rank)

    @property
    def broken(self) -> int:
        """The address of a word that is not 0 once the group is broken."""
        return int(self._library.paceline_broken(self._comm))

    def all_gather(self, source: int, to: Sequence[int], nbytes: int, timeout: float) -> None:
        """to: room for ``nbytes`` of each rank."""
        each = (c_void_p * self.size)(*to)
        call = self._library.paceline_all_gather
        self._check(call(self._comm, source, each, nbytes, timeout), timeout)

    def broadcast(self, data: int, nbytes: int, root: int, timeout: float) -> None:
        call = self._library.paceline_broadcast
        self._check(call(self._comm, data, nbytes, root, timeout), timeout)

    def barrier(self, timeout: float) -> None:
        self._check(self._library.paceline_barrier(self._comm, timeout), timeout)

    def close(self) -> None:
        """Of a group that is not used any more: to the others, this rank has gone."""
        comm, self._comm = self._comm, None
        fd, self._fd = self._fd, -1
        if comm:
            self._library.paceline_close(comm)
        if fd >= 0:
            os.close(fd)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else modules are gone already, and the kernel of the system closes all
            self.close()

    def _check(self, error: int, timeout: float) -> None:
        if error:
            self._raise(error, timeout)

    def _raise(self, error: int, timeout: float) -> None:
        why, rank = error & 0xFF, error >> 8
        said = (c_uint64 * 18)()
        self._library.paceline_said(self._comm, said)
        (_, mine), *two = [(int(said[at]), Call(*said[at + 1 : at + 6])) for at in (0, 6, 12)]
        if why == DIED:
            raise died(mine, self._names[rank])
        if why == SILENT:
            raise silent(mine, self._names[rank], timeout)
        if why == OUTSIDE:
            raise ExchangeError(f"{mine} can't go on: rank {self._names[rank]} lost other hosts")
        raise differ([(self._names[rank], call) for rank, call in two])
