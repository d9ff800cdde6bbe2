"""The shared-memory kernel in C (kernel.c), called through ctypes, which releases the GIL."""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_double, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from ...record.hooks.error_messages import NAMED_PEER_GONE
from .collective_calls import (
    CollectiveCall,
    ExchangeError,
    mismatch_error,
    rank_died_error,
    timeout_error,
)
from .memory import is_alive

LIBRARY_PATH = Path(__file__).parent / "kernel.so"
# other codes: ranks called different collectives
RANK_DIED, RANK_TIMED_OUT, LOST_OTHER_HOSTS = 1, 2, 4


def load_library(path: Path, prefix: str, signatures: Mapping[str, Sequence[Any]]) -> ctypes.CDLL:
    """Load a compiled library, and declare its functions: result and arguments by name."""
    loaded = ctypes.CDLL(str(path), use_errno=True)
    for name, (result, *arguments) in signatures.items():
        function = getattr(loaded, f"{prefix}{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


@cache
def library() -> ctypes.CDLL:
    """Load the compiled kernel and declare its functions.

    Raises OSError where it was not built (no compiler at the installation).
    """
    signatures = {
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
    return load_library(LIBRARY_PATH, "paceline_", signatures)


class CKernel:
    """One rank's view of a group of ranks that share the memory behind ``fd``.

    The kernel owns ``fd`` and closes it. Vectors are given by address and size in bytes; dtype and
    reduction are positions in collective_calls.DTYPES and REDUCTIONS; timeouts are in seconds.
    names: numbers of the group's ranks in the job. Collectives raise ExchangeError.
    """

    @staticmethod
    def required_bytes(size: int, slot: int) -> int:
        """Return the bytes of shared memory that a group needs."""
        return int(library().paceline_needs(size, slot))

    def __init__(self, fd: int, rank: int, size: int, slot: int, names: Sequence[int] = ()) -> None:
        self._library, self._fd, self._comm = library(), fd, None
        if self._library.paceline_hold(fd, rank):
            raise OSError(ctypes.get_errno(), "this rank can't lock its byte of the shared memory")
        self._comm = self._library.paceline_open(fd, rank, size, slot, 1)
        if not self._comm:
            raise OSError(ctypes.get_errno(), "the shared memory can't be mapped")
        self.rank, self.size, self.sockets = rank, size, 0
        self._names = list(names) or list(range(size))
        self._all_reduce = self._library.paceline_all_reduce

    def all_reduce(
        self, address: int, nbytes: int, dtype: int, reduction: int, timeout: float
    ) -> None:
        """Reduce the vector of all ranks in place."""
        error = self._all_reduce(self._comm, address, nbytes, dtype, reduction, timeout)
        if error:
            self._raise(error, timeout)

    def reduce_scatter(
        self,
        source_addresses: Sequence[int],
        destination: int,
        nbytes: int,
        dtype: int,
        reduction: int,
        timeout: float,
        divisor: int = 0,
    ) -> None:
        """Reduce this rank's vector over all ranks into ``destination``.

        source_addresses: one vector of ``nbytes`` for each rank. divisor: of a mean; 0 for the
        number of ranks.
        """
        sources = (c_void_p * self.size)(*source_addresses)
        function = self._library.paceline_reduce_scatter
        self._check(
            function(self._comm, sources, destination, nbytes, dtype, reduction, divisor, timeout),
            timeout,
        )

    def reduce_parts(
        self,
        address: int,
        nbytes: int,
        part: int,
        dtype: int,
        reduction: int,
        divisor: int,
        timeout: float,
    ) -> None:
        """Reduce each rank's part of the vector over the ranks of this host, on that rank only.

        The part of rank q has ``part`` bytes and starts at byte q * part; the vector's end cuts it
        short. divisor: of a mean.
        """
        function = self._library.paceline_reduce_parts
        self._check(
            function(self._comm, address, nbytes, part, dtype, reduction, divisor, timeout), timeout
        )

    def gather_parts(self, address: int, nbytes: int, part: int, timeout: float) -> None:
        """Copy every rank's part to all ranks of this host."""
        function = self._library.paceline_gather_parts
        self._check(function(self._comm, address, nbytes, part, timeout), timeout)

    def set_socket(self, socket: int, wanted: bool) -> None:
        """Publish the socket of this rank; call it before any rank calls detect_sockets().

        wanted: whether the user requests reduction by sockets on this rank.
        """
        self._library.paceline_on_socket(self._comm, socket, wanted)

    def detect_sockets(self) -> bool:
        """Set ``sockets`` to the number of sockets that the ranks run on.

        It is 0 unless there are several, at least one of them with several ranks. Return whether
        all ranks have the same setting for reduction by sockets.
        """
        count = self._library.paceline_sockets(self._comm)
        self.sockets = max(count, 0)
        return bool(count >= 0)

    def use_socket_reduction(self, enabled: bool) -> None:
        """Reduce within each socket first, from the next collective on.

        Call it on all ranks while no collective is in progress. No effect without sockets.
        """
        self._library.paceline_by_socket(self._comm, enabled)

    def break_group(self) -> None:
        """Fail the group on every rank of this node: this rank has lost connections to others."""
        if self._comm:
            self._library.paceline_break(self._comm, self.rank)

    @property
    def broken_address(self) -> int:
        """The address of a 32-bit word that is not 0 once the group is broken."""
        return int(self._library.paceline_broken(self._comm))

    def all_gather(
        self, source: int, destination_addresses: Sequence[int], nbytes: int, timeout: float
    ) -> None:
        """Gather a vector of ``nbytes`` from each rank.

        destination_addresses: room for ``nbytes`` of each rank.
        """
        destinations = (c_void_p * self.size)(*destination_addresses)
        function = self._library.paceline_all_gather
        self._check(function(self._comm, source, destinations, nbytes, timeout), timeout)

    def broadcast(self, address: int, nbytes: int, root: int, timeout: float) -> None:
        function = self._library.paceline_broadcast
        self._check(function(self._comm, address, nbytes, root, timeout), timeout)

    def barrier(self, timeout: float) -> None:
        self._check(self._library.paceline_barrier(self._comm, timeout), timeout)

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank lives."""
        return rank == self.rank or is_alive(self._fd, rank)

    def close(self) -> None:
        """Release the memory and this rank's lock; the other ranks then see this rank as ended."""
        comm, self._comm = self._comm, None
        fd, self._fd = self._fd, -1
        if comm:
            self._library.paceline_close(comm)
        if fd >= 0:
            os.close(fd)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end modules are gone already, and the operating system closes all.
        if not ending():
            self.close()

    def _check(self, error: int, timeout: float) -> None:
        if error:
            self._raise(error, timeout)

    def _raise(self, error: int, timeout: float) -> None:
        reason, rank = error & 0xFF, error >> 8
        words = (c_uint64 * 18)()
        self._library.paceline_said(self._comm, words)
        (_, own_call), *mismatch = [
            (int(words[at]), CollectiveCall(*words[at + 1 : at + 6])) for at in (0, 6, 12)
        ]
        if reason == RANK_DIED:
            raise rank_died_error(own_call, self._names[rank])
        if reason == RANK_TIMED_OUT:
            raise timeout_error(own_call, self._names[rank], timeout)
        if reason == LOST_OTHER_HOSTS:
            raise ExchangeError(
                f"{own_call} {NAMED_PEER_GONE} {self._names[rank]} lost its connections to other "
                "nodes"
            )
        raise mismatch_error([(self._names[rank], call) for rank, call in mismatch])
