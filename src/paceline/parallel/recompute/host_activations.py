"""Activations of a block that wait for its backward in the host's memory.

PyTorch's ``save_on_cpu`` moves parameters too, and a tensor as often as it is saved. Here
parameters and buffers stay, and each storage is copied once, on a stream of its own: computation
goes on meanwhile. In backward, the first tensor that is needed starts the copies of all others.
"""

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 1 << 16  # smaller storages stay where they are
MAX_LEAVING_BYTES = 256 << 20  # of a device, that are being copied and not free yet
PROBE_BYTES = 64 << 20


def is_movable(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a saved tensor is moved: on a GPU, dense, and not small."""
    return tensor.is_cuda and _is_plain(tensor) and tensor.untyped_storage().nbytes() >= LEAST_BYTES


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return is_dense and not tensor.is_conj() and not tensor.is_neg()


class LeavingStorages:
    """Storages of one device whose copies to the host have been launched.

    The stream that computes waits for a copy before its storage is freed, so that the memory can be
    used again in the order of that stream. (``record_stream`` frees it when the host sees that the
    copy has ended: a host that runs ahead would have allocated other memory by then.)

    Attributes:
        limit: Bytes that are held at most, beside the last storage.
    """

    def __init__(self) -> None:
        self.limit = MAX_LEAVING_BYTES
        self._held: deque[tuple[torch.Tensor, Any, Any]] = deque()
        self._bytes = 0

    def add(self, source: torch.Tensor, stream: Any, copied: Any) -> None:
        """Hold the bytes of a storage until ``stream`` has waited for the event ``copied``."""
        self._held.append((source, stream, copied))
        self._bytes += source.nbytes
        while self._bytes > self.limit and len(self._held) > 1:
            self._free_oldest()

    def free(self) -> None:
        while self._held:
            self._free_oldest()

    def _free_oldest(self) -> None:
        source, stream, copied = self._held.popleft()
        stream.wait_event(copied)
        self._bytes -= source.nbytes


@functools.cache
def leaving_storages(device: torch.device) -> LeavingStorages:
    """Return the storages of a device that are on their way to the host."""
    return LeavingStorages()


class _Moved:
    """A storage in the host's memory, and on the device while backward needs it.

    Attributes:
        views: Number of saved tensors that share it.
        left: How many of them the present backward has not read.
        is_done: Whether the present backward has read all of them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.back: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        storage = tensor.untyped_storage()
        self.device, self.views, self.left, self.is_done = tensor.device, 0, 0, False
        # While this exists, no other storage has the same address.
        self.original = StorageWeakRef(storage)
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self.host = torch.empty(len(source), dtype=torch.uint8, pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self.host.copy_(source)
            return
        stream, computing = copy_stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            self.host.copy_(source, non_blocking=True)
            copied = stream.record_event()
        leaving_storages(self.device).add(source, computing, copied)

    def fetch(self) -> None:
        """Start the copy back to the device."""
        if self.back is not None:
            return
        self.left = self.views
        leaving_storages(self.device).free()  # their copies precede those back
        self.back = torch.empty(len(self.host), dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            self.back.copy_(self.host)
            return
        stream = copy_stream(self.device)
        # The memory may have been in use by what the current stream still computes.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.back.copy_(self.host, non_blocking=True)
            self.arrived = stream.record_event()

    def __del__(self) -> None:
        if self.back is not None and self.arrived is not None:
            # a backward that failed: no stream may have waited for the copy into this memory
            self.back.record_stream(copy_stream(self.device))

    def take(self) -> torch.Tensor:
        """Return the bytes on the device. After the last view, only the caller holds them."""
        self.fetch()
        assert self.back is not None
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.arrived)
            # without effect on the stream on which it was allocated
            self.back.record_stream(stream)
        found, self.left = self.back, self.left - 1
        self.is_done = self.left == 0
        if self.is_done:
            self.back = self.arrived = None
        return found


class _View(NamedTuple):
    """A saved tensor as a part of a moved storage."""

    moved: _Moved
    block: "list[_Moved]"
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def rebuild(self) -> torch.Tensor:
        if all(moved.is_done for moved in self.block):  # another backward (retain_graph)
            for moved in self.block:
                moved.is_done = False
        for moved in reversed(self.block):
            if not moved.is_done:
                moved.fetch()
        storage = self.moved.take().untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=self.moved.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def activations_on_host(
    module: nn.Module, moves: Callable[[torch.Tensor], bool] = is_movable
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context for one forward of ``module``: what autograd saves in it moves to the host.

    Args:
        moves: Whether the storage of a saved tensor is moved.
    """
    stay = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    block: list[_Moved] = []
    by_storage: dict[tuple[int, int], _Moved] = {}

    def pack(tensor: torch.Tensor) -> Any:
        address = tensor.untyped_storage()._cdata
        if not moves(tensor) or address in stay:
            return tensor
        key = (address, tensor._version)  # a tensor changed in place is saved once more
        if key not in by_storage:
            by_storage[key] = _Moved(tensor)
            block.append(by_storage[key])
        moved = by_storage[key]
        moved.views += 1
        return _View(
            moved,
            block,
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
        )

    def unpack(packed: Any) -> torch.Tensor:
        return packed.rebuild() if isinstance(packed, _View) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU on which activations are copied."""
    return torch.cuda.Stream(device)


@functools.cache
def seconds_per_byte(device: torch.device) -> float:
    """Return the measured time of a byte's way to the host and back, from 64 MiB."""
    host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    seconds = float("inf")
    for _ in range(3):
        start = now(device)
        host.copy_(there)
        there.copy_(host)
        seconds = min(seconds, now(device) - start)
    return seconds / PROBE_BYTES


def now(device: torch.device) -> float:
    """Return a time in seconds after all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
