"""The shared-memory kernel in torch operations, for hosts where the kernel in C was not built.

It needs x86, whose processors make stores visible in program order: Python has no fences.
"""

import ctypes
import fcntl
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .collective_calls import (
    COLLECTIVES,
    DTYPES,
    REDUCTIONS,
    CollectiveCall,
    mismatch_error,
    rank_died_error,
    timeout_error,
)
from .memory import is_alive

CACHE_LINE_BYTES = 64
MAX_ELEMENT_BYTES = 8  # a slot holds an element for each rank
CALL_FIELDS = 5  # 64-bit words of a published call
# polls of a late rank's counter before it sleeps between polls
SPINS_BEFORE_SLEEP = 200
SLEEP_S = 0.0005
TORCH_DTYPES = [getattr(torch, name) for name in DTYPES]


class TorchKernel:
    """One rank's view of a group of ranks that share memory, with the interface of CKernel.

    It does not reduce by sockets. Each rank has two slots, used alternately.
    """

    sockets = 0

    @staticmethod
    def required_bytes(size: int, slot: int) -> int:
        """Return the bytes of shared memory that a group needs."""
        return size * (2 * CACHE_LINE_BYTES + 2 * CACHE_LINE_BYTES + 2 * slot)

    def __init__(self, fd: int, rank: int, size: int, slot: int, names: Sequence[int] = ()) -> None:
        self.rank, self.size, self._slot, self._fd = rank, size, slot, fd
        # held as long as this process lives
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._names = list(names) or list(range(size))
        self._memory = mmap.mmap(fd, self.required_bytes(size, slot))
        words = np.frombuffer(self._memory, np.uint64)
        each = 2 * CACHE_LINE_BYTES // 8
        self._ended_phases = words[: size * each : each]
        calls = words[size * each : 2 * size * each].reshape(size, 2, CACHE_LINE_BYTES // 8)
        self._calls = calls[:, :, :CALL_FIELDS]
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._slots = whole[4 * CACHE_LINE_BYTES * size :].view(2, size, slot)
        self._phase = self._chunk = 0
        self._call = CollectiveCall(0)

    def all_reduce(
        self, address: int, nbytes: int, dtype: int, reduction: int, timeout: float
    ) -> None:
        vector = _bytes_at(address, nbytes)
        self._start_call(
            CollectiveCall(COLLECTIVES.index("all-reduce"), dtype, reduction, 0, nbytes), timeout
        )
        for part in _chunks(nbytes, self._slot):
            slots = self._fill_slots([vector[part]])[:, : part.stop - part.start]
            own_part = self._part_of(slots.shape[1])
            slots[self.rank, own_part] = _reduce_rows(slots[:, own_part], dtype, reduction)
            self._end_phase()
            for rank in range(self.size):
                rank_part = self._part_of(slots.shape[1], rank)
                vector[part][rank_part] = slots[rank, rank_part]
            self._end_phase()

    def reduce_scatter(
        self,
        sources: Sequence[int],
        destination: int,
        nbytes: int,
        dtype: int,
        reduction: int,
        timeout: float,
    ) -> None:
        own, result = (
            [_bytes_at(source, nbytes) for source in sources],
            _bytes_at(destination, nbytes),
        )
        self._start_call(
            CollectiveCall(COLLECTIVES.index("reduce-scatter"), dtype, reduction, 0, nbytes),
            timeout,
        )
        share = self._slot // self.size
        align = CACHE_LINE_BYTES if share >= CACHE_LINE_BYTES else MAX_ELEMENT_BYTES
        chunk_bytes = share // align * align
        for part in _chunks(nbytes, chunk_bytes):
            slots, count = self._fill_slots([row[part] for row in own]), part.stop - part.start
            rank_part = slots[:, count * self.rank : count * (self.rank + 1)]
            result[part] = _reduce_rows(rank_part, dtype, reduction)
            self._end_phase()

    def all_gather(
        self, source: int, destinations: Sequence[int], nbytes: int, timeout: float
    ) -> None:
        own, outputs = _bytes_at(source, nbytes), [_bytes_at(to, nbytes) for to in destinations]
        self._start_call(CollectiveCall(COLLECTIVES.index("all-gather"), nbytes=nbytes), timeout)
        for part in _chunks(nbytes, self._slot):
            slots = self._fill_slots([own[part]])
            for rank, output in enumerate(outputs):
                output[part] = slots[rank, : part.stop - part.start]
            self._end_phase()

    def broadcast(self, address: int, nbytes: int, root: int, timeout: float) -> None:
        own = _bytes_at(address, nbytes)
        self._start_call(
            CollectiveCall(COLLECTIVES.index("broadcast"), root=root, nbytes=nbytes), timeout
        )
        for part in _chunks(nbytes, self._slot):
            slots = self._fill_slots([own[part]] if self.rank == root else [])
            if self.rank != root:
                own[part] = slots[root, : part.stop - part.start]
            self._end_phase()

    def barrier(self, timeout: float) -> None:
        self._start_call(CollectiveCall(COLLECTIVES.index("barrier")), timeout)
        self._fill_slots([])
        self._end_phase()

    def close(self) -> None:
        """Release this rank's lock, so that the others see it as ended.

        The memory is unmapped with the last tensor over it.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self.close()

    # phases

    def _start_call(self, call: CollectiveCall, timeout: float) -> None:
        self._call, self._timeout = call, timeout

    def _fill_slots(self, sources: list[torch.Tensor]) -> torch.Tensor:
        """Copy ``sources`` into this rank's slot of the next chunk; return the slots of all ranks.

        Waits until all ranks have filled theirs, and raises ExchangeError where one calls a
        different collective. Every rank has ended the chunk before the previous one, so its slot is
        free.
        """
        slot_index, self._chunk = self._chunk % 2, self._chunk + 1
        slots, at = self._slots[slot_index], 0
        for source in sources:
            slots[self.rank, at : at + len(source)] = source
            at += len(source)
        call = self._call
        self._calls[self.rank, slot_index] = (
            call.op,
            call.dtype,
            call.reduction,
            call.root,
            call.nbytes,
        )
        self._end_phase()
        for rank in range(self.size):
            other = CollectiveCall(*map(int, self._calls[rank, slot_index]))
            if other != call:
                names = self._names
                raise mismatch_error([(names[self.rank], call), (names[rank], other)])
        return slots

    def _part_of(self, count: int, rank: int | None = None) -> slice:
        """Return the slice of a chunk that a rank reduces; by default this rank."""
        rank = self.rank if rank is None else rank
        each = -(-count // self.size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return slice(min(each * rank, count), min(each * (rank + 1), count))

    def _end_phase(self) -> None:
        """Publish that this rank has ended a phase, and wait until all ranks have."""
        self._phase += 1
        self._ended_phases[self.rank] = self._phase
        start = time.monotonic()
        for rank in range(self.size):
            checks = 0
            while self._ended_phases[rank] < self._phase:
                checks += 1
                time.sleep(0 if checks < SPINS_BEFORE_SLEEP else SLEEP_S)
                if checks % SPINS_BEFORE_SLEEP:
                    continue
                if not self.is_alive(rank) and self._ended_phases[rank] < self._phase:
                    raise rank_died_error(self._call, self._names[rank])
                if self._timeout and time.monotonic() - start > self._timeout:
                    raise timeout_error(self._call, self._names[rank], self._timeout)

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank lives."""
        return rank == self.rank or is_alive(self._fd, rank)


def _chunks(nbytes: int, chunk_bytes: int) -> list[slice]:
    """Return the slices of the chunks; at least one, so that all ranks synchronize."""
    return [
        slice(at, min(at + chunk_bytes, nbytes)) for at in range(0, max(nbytes, 1), chunk_bytes)
    ]


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """Return the memory at an address as a tensor of uint8."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _reduce_rows(rows: torch.Tensor, dtype_index: int, reduction_index: int) -> torch.Tensor:
    """Reduce rows of uint8, one for each rank, in rank order; 16-bit types as float32."""
    dtype, name = TORCH_DTYPES[dtype_index], REDUCTIONS[reduction_index]
    vectors = [row.contiguous().view(dtype) for row in rows]
    if dtype in (torch.float16, torch.bfloat16):
        vectors = [row.float() for row in vectors]
    result: torch.Tensor = vectors[0].clone()
    for row in vectors[1:]:
        if name in ("sum", "mean"):
            result += row
        elif name == "product":
            result *= row
        else:
            result = torch.minimum(result, row) if name == "min" else torch.maximum(result, row)
    if name == "mean":
        result /= len(vectors)
    return result.to(dtype).view(torch.uint8)
