"""A digest of a tensor's content, of which large tensors are summed on their device."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from . import state_tree

DIGEST_BYTES = 16
_HASHED_BYTES = 1 << 16  # of larger tensors the digest has sums
_ROW = 512  # 64-bit integers


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of dtype, shape and bits of a tensor."""
    content = hashlib.blake2b(digest_size=DIGEST_BYTES)
    add_tensor(tensor, content.update)
    return content.digest()


def add_tensor(tensor: torch.Tensor, add: Callable[[bytes], None]) -> None:
    """Add dtype, shape and bits of a tensor to a digest."""
    add(f"{tensor.dtype} {tensor.layout} {tensor.is_nested or tuple(tensor.shape)};".encode())
    if tensor.is_quantized:
        add(f"{tensor.qscheme()}".encode())
        add(f"{_quantization(tensor)}".encode())
    for dense in state_tree.dense_parts(tensor):
        _add_dense(dense, add)


def _quantization(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.q_scale(), tensor.q_zero_point()
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return scales.tolist(), points.tolist(), tensor.q_per_channel_axis()


def _add_dense(tensor: torch.Tensor, add: Callable[[bytes], None]) -> None:
    """Add the bits of a tensor to a digest, on its device as far as it is large.

    Of a large tensor the bits are summed as integers, in rows and in columns. So also tensors that
    have the same elements in another order differ.
    """
    flat = tensor.contiguous().resolve_conj().resolve_neg().flatten()
    if flat.numel() == 0:
        return
    octets = flat.view(torch.uint8)
    if octets.numel() > _HASHED_BYTES:
        summed = octets.numel() // (8 * _ROW) * (8 * _ROW)
        block = octets[:summed]
        if block.data_ptr() % 8 or block.storage_offset() % 8:
            block = block.clone()
        rows = block.view(torch.int64).view(-1, _ROW)
        _add_dense(rows.sum(1), add)
        _add_dense(rows.sum(0), add)
        octets = octets[summed:]
    add(octets.cpu().numpy().tobytes())
