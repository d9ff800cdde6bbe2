"""Ranks of a tensor axis as threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from paceline.parallel.tensor.exchange import TensorAxis


class ThreadAxis(TensorAxis):
    """An axis whose ranks are threads, which exchange through a list."""

    def __init__(self, rank, size, barrier, box):
        self.group, self.rank, self.size = None, rank, size
        self._barrier, self._box = barrier, box

    def pieces(self, local):
        self._box[self.rank] = local.detach().clone(memory_format=torch.contiguous_format)
        self._barrier.wait(timeout=20)
        found = list(self._box)
        self._barrier.wait(timeout=20)
        return found

    def sum_piece(self, tensor, split):
        return split.cut(self.sum(tensor), self.rank, self.size)

    def sum(self, tensor):
        return torch.stack(self.pieces(tensor)).sum(0)


def on_threads(size, function):
    """Return what ``function(axis)`` returns on each rank."""
    barrier, box = threading.Barrier(size), [None] * size

    def run(rank):
        try:
            return function(ThreadAxis(rank, size, barrier, box))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [one.exception() for one in futures]
        real = [
            e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)
        ]
        if real:
            raise real[0]
        return [one.result() for one in futures]
