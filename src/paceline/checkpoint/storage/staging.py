"""Copies of tensors for a save, in memory that the next save uses again."""

import mmap
from collections.abc import Sequence

import torch

from .pages import PAGE_BYTES, map_memory

MIN_STAGED_BYTES = 64 << 10  # smaller tensors are copied one by one


class StagingMemory:
    """Memory for the tensors of one save.

    A tensor begins on a page, so that it can be written without another copy. The memory remains
    until a save needs more of it, or less than half.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies in CPU memory, each with a storage of its own.

        They are valid until the next call.
        """
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end if _is_staged(tensor) else -1)
            end += -(-tensor.nbytes // PAGE_BYTES) * PAGE_BYTES if _is_staged(tensor) else 0
        memory = self._reserve(end)
        return [
            _copy(tensor) if at < 0 else _copy_into(memory, at, tensor)
            for tensor, at in zip(tensors, offsets, strict=True)
        ]

    def _reserve(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or not len(self._memory) // 2 <= nbytes <= len(self._memory):
            self._memory = None  # first, so that both do not exist at the same time
            self._memory = map_memory(max(nbytes, PAGE_BYTES))
        return self._memory


def _is_staged(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() and tensor.nbytes >= MIN_STAGED_BYTES


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _copy_into(memory: mmap.mmap, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    octets = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
    return octets.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
