"""The same phases in torch, where the kernel in C was not built. On x86 alone, whose processors
show stores to each other in their order: Python has no fences."""

import ctypes
import fcntl
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .collective_calls import HOWS, KINDS, OPS, Call, died, differ, silent

LINE = 64
FIELDS = 5  # of a call, as 64 bits each
SPINS, NAP = 200, 0.0005  # looks at a late rank's counter before sleeping, and seconds of a sleep
DTYPES = [getattr(torch, name) for name in KINDS]
_FLOCK = "hhqqi"


class InTorch:
    """As native.Kernel, without its level of sockets. A rank has two slots, which take turns."""

    sockets = 0

    @staticmethod
    def needs(size: int, slot: int) -> int:
        """Bytes of memory of a group."""
        return size * (2 * LINE + 2 * LINE + 2 * slot)

    def __init__(self, fd: int, rank: int, size: int, slot: int, names: Sequence[int] = ()) -> None:
        self.rank, self.size, self._slot, self._fd = rank, size, slot, fd
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)  # as long as this process lives
        self._names = list(names) or list(range(size))
        self._memory = mmap.mmap(fd, self.needs(size, slot))
        words = np.frombuffer(self._memory, np.uint64)
        each = 2 * LINE // 8
        self._posted = words[: size * each : each]
        calls = words[size * each : 2 * size * each].reshape(size, 2, LINE // 8)
        self._calls = calls[:, :, :FIELDS]
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._slots = whole[4 * LINE * size :].view(2, size, slot)
        self._phase = self._chunk = 0
        self._call = Call(0)

    def all_reduce(self, data: int, nbytes: int, kind: int, how: int, timeout: float) -> None:
        mine = _bytes(data, nbytes)
        self._begin(Call(OPS.index("all-reduce"), kind, how, 0, nbytes), timeout)
        for part in _chunks(nbytes, self._slot):
            slots = self._filled([mine[part]])[:, : part.stop - part.start]
            own = self._own(slots.shape[1])
            slots[self.rank, own] = _combined(slots[:, own], kind, how)
            self._post()
            for rank in range(self.size):
                theirs = self._own(slots.shape[1], rank)
                mine[part][theirs] = slots[rank, theirs]
            self._post()

    def reduce_scatter(
        self, sources: Sequence[int], to: int, nbytes: int, kind: int, how: int, timeout: float
    ) -> None:
        mine, into = [_bytes(one, nbytes) for one in sources], _bytes(to, nbytes)
        self._begin(Call(OPS.index("reduce-scatter"), kind, how, 0, nbytes), timeout)
        most = self._slot // self.size // LINE * LINE
        for part in _chunks(nbytes, most):
            slots, count = self._filled([one[part] for one in mine]), part.stop - part.start
            theirs = slots[:, count * self.rank : count * (self.rank + 1)]
            into[part] = _combined(theirs, kind, how)
            self._post()

    def all_gather(self, source: int, to: Sequence[int], nbytes: int, timeout: float) -> None:
        mine, places = _bytes(source, nbytes), [_bytes(one, nbytes) for one in to]
        self._begin(Call(OPS.index("all-gather"), nbytes=nbytes), timeout)
        for part in _chunks(nbytes, self._slot):
            slots = self._filled([mine[part]])
            for rank, place in enumerate(places):
                place[part] = slots[rank, : part.stop - part.start]
            self._post()

    def broadcast(self, data: int, nbytes: int, root: int, timeout: float) -> None:
        mine = _bytes(data, nbytes)
        self._begin(Call(OPS.index("broadcast"), root=root, nbytes=nbytes), timeout)
        for part in _chunks(nbytes, self._slot):
            slots = self._filled([mine[part]] if self.rank == root else [])
            if self.rank != root:
                mine[part] = slots[root, : part.stop - part.start]
            self._post()

    def barrier(self, timeout: float) -> None:
        self._begin(Call(OPS.index("barrier")), timeout)
        self._filled([])
        self._post()

    def close(self) -> None:
        """To the others, this rank has gone; the memory goes with the last tensor over it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self.close()

    # phases

    def _begin(self, call: Call, timeout: float) -> None:
        self._call, self._timeout = call, timeout

    def _filled(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """All ranks' slots of the next chunk, once each is filled (this one's with ``pieces``) and
        all do the same. Every rank has ended its chunk before: its other slot is free by then."""
        turn, self._chunk = self._chunk % 2, self._chunk + 1
        slots, at = self._slots[turn], 0
        for piece in pieces:
            slots[self.rank, at : at + len(piece)] = piece
            at += len(piece)
        call = self._call
        self._calls[self.rank, turn] = (call.op, call.kind, call.how, call.root, call.nbytes)
        self._post()
        for rank in range(self.size):
            other = Call(*map(int, self._calls[rank, turn]))
            if other != call:
                names = self._names
                raise differ([(names[self.rank], call), (names[rank], other)])
        return slots

    def _own(self, count: int, rank: int | None = None) -> slice:
        """The part of a chunk that a rank sums up."""
        rank = self.rank if rank is None else rank
        each = -(-count // self.size // LINE) * LINE
        return slice(min(each * rank, count), min(each * (rank + 1), count))

    def _post(self) -> None:
        """This rank has ended a phase, and waits until all have."""
        self._phase += 1
        self._posted[self.rank] = self._phase
        begun = time.monotonic()
        for rank in range(self.size):
            looks = 0
            while self._posted[rank] < self._phase:
                looks += 1
                time.sleep(0 if looks < SPINS else NAP)
                if looks % SPINS:
                    continue
                if not self._alive(rank) and self._posted[rank] < self._phase:
                    raise died(self._call, self._names[rank])
                if self._timeout and time.monotonic() - begun > self._timeout:
                    raise silent(self._call, self._names[rank], self._timeout)

    def _alive(self, rank: int) -> bool:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, rank, 1, 0)
        told = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return rank == self.rank or told[0] != fcntl.F_UNLCK


def _chunks(nbytes: int, most: int) -> list[slice]:
    """At least one, so that all come together."""
    return [slice(at, min(at + most, nbytes)) for at in range(0, max(nbytes, 1), most)]


def _bytes(address: int, nbytes: int) -> torch.Tensor:
    """The memory there."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    room = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(room, dtype=torch.uint8)


def _combined(rows: torch.Tensor, kind: int, how: int) -> torch.Tensor:
    """rows: uint8, one for each rank. In the order of ranks; 16 bits as float32."""
    dtype, name = DTYPES[kind], HOWS[how]
    each = [row.contiguous().view(dtype) for row in rows]
    if dtype in (torch.float16, torch.bfloat16):
        each = [row.float() for row in each]
    found: torch.Tensor = each[0].clone()
    for row in each[1:]:
        if name in ("sum", "mean"):
            found += row
        elif name == "product":
            found *= row
        else:
            found = torch.minimum(found, row) if name == "min" else torch.maximum(found, row)
    if name == "mean":
        found /= len(each)
    return found.to(dtype).view(torch.uint8)
