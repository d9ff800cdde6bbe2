"""Ranks of one host as threads of one process, over one shared memory."""

import os
import threading

import torch

from paceline.comm.shared.c_kernel import CKernel, library
from paceline.comm.shared.collective_calls import REDUCTIONS
from paceline.comm.shared.torch_kernel import TORCH_DTYPES, TorchKernel

SLOT = 1 << 16
TIMEOUT = 20.0


class CThread(CKernel):
    """The kernel in C for a rank that is a thread: POSIX locks belong to the whole process."""

    def __init__(self, fd, rank, size, slot):
        self._library, self._fd = library(), -1
        self._comm = self._library.paceline_open(fd, rank, size, slot, 0)
        assert self._comm
        self.rank, self.size, self.sockets = rank, size, 0
        self._names = list(range(size))
        self._all_reduce = self._library.paceline_all_reduce


class TorchThread(TorchKernel):
    def is_alive(self, rank):
        return True


KERNELS = {"c": CThread, "torch": TorchThread}


def together(size, what, kind="c", slot=SLOT, sockets=""):
    """Run ``what(kernel)`` on every rank at the same time; return the results by rank.

    sockets: digit i is the socket of rank i. Fails if a rank has not returned after TIMEOUT.
    """
    fd = os.memfd_create("test")
    os.truncate(fd, KERNELS[kind].required_bytes(size, slot))
    kernels = [
        KERNELS[kind](fd if kind == "c" else os.dup(fd), at, size, slot) for at in range(size)
    ]
    for kernel, socket in zip(kernels, sockets, strict=False):
        kernel.set_socket(int(socket), True)
    for kernel in kernels[: len(sockets)]:
        assert kernel.detect_sockets()
        kernel.use_socket_reduction(True)
    found = {}

    def run(kernel):
        try:
            found[kernel.rank] = what(kernel)
        except Exception as error:
            found[kernel.rank] = error

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    os.close(fd)
    waiting = [rank for rank in range(size) if rank not in found]
    assert not waiting, f"ranks {waiting} have not returned"
    for one in found.values():
        if isinstance(one, Exception):
            raise one
    for kernel in kernels:
        kernel.close()
    return [found[rank] for rank in range(size)]


def reduced(kernel, tensor, how, timeout=TIMEOUT):
    """Return the all-reduced tensor."""
    found = tensor.clone()
    dtype = TORCH_DTYPES.index(found.dtype)
    kernel.all_reduce(found.data_ptr(), found.nbytes, dtype, REDUCTIONS.index(how), timeout)
    return found


def scattered(kernel, tensor, how):
    """Return this rank's part of the reduced tensor, which has one row for each rank."""
    found, dtype = torch.empty_like(tensor[0]), TORCH_DTYPES.index(tensor.dtype)
    rows = [row.data_ptr() for row in tensor]
    kernel.reduce_scatter(
        rows, found.data_ptr(), found.nbytes, dtype, REDUCTIONS.index(how), TIMEOUT
    )
    return found
