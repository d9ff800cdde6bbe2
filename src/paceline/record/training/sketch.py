"""Sketches of tensors: few numbers that show whether a tensor is a sum or a multiple of others.

A sketch is a linear map of the flattened tensor onto ``SKETCH_SIZE`` numbers (Charikar, Chen and
Farach-Colton, "Finding frequent items in data streams", 2002): each element is added, with a sign,
to one of them. Sign and position depend on the index of the element only. So the sketch of a mean
is the mean of the sketches, on every rank, and the sketch of a sharded tensor is the sum of those
of its shards. The sum of the squares of a difference of two sketches estimates that of the tensors.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from .sketch_rows import CHECKSUM, NONFINITE, ROW_SIZE, SKETCH_SIZE, SQUARES

_CHUNK = 1 << 22  # elements at a time
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIXER = -4658895280553007687  # 0xBF58476D1CE4E5B9


def sketch(tensor: torch.Tensor, offset: int = 0) -> NDArray[np.float64]:
    """Return the row of a tensor, or of a shard of it.

    Args:
        tensor: Any shape, dtype and device; complex values count as pairs.
        offset: Position of the first element in the flattened whole tensor.

    Returns:
        ``ROW_SIZE`` numbers. Elements that are not finite count as 0 in the first two parts.
    """
    row = torch.zeros(ROW_SIZE, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        values = tensor.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        flat = values.reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK].cpu()
            _add(row, part.to(torch.float64), offset + start)
        row[CHECKSUM] = row[CHECKSUM] % (1 << 53)
    return row.numpy()


def _add(row: torch.Tensor, part: torch.Tensor, first: int) -> None:
    hashed = torch.arange(first, first + part.numel(), dtype=torch.int64, device="cpu")
    hashed = hashed * _MULTIPLIER
    hashed = (hashed ^ (hashed >> 29)) * _MIXER
    bucket = (hashed >> 40) & (SKETCH_SIZE - 1)
    sign = ((hashed >> 50) & 1) * 2 - 1
    finite = part.isfinite()
    row[NONFINITE] += part.numel() - int(finite.sum())
    clean = torch.where(finite, part, torch.zeros_like(part))
    row[:SKETCH_SIZE].index_add_(0, bucket, clean * sign)
    row[SQUARES] += clean.square().sum()
    bits = part.view(torch.int64)
    mixed = ((bits ^ hashed) * _MULTIPLIER) >> 24  # 40 bits, with the position of each
    row[CHECKSUM] = (row[CHECKSUM] + float(mixed.sum())) % float(1 << 53)


class SketchTable:
    """The rows of one rank."""

    def __init__(self) -> None:
        self._rows: list[NDArray[np.float64]] = []

    def add(self, tensor: torch.Tensor, offset: int = 0) -> int:
        """Add the row of a tensor, and return its number."""
        self._rows.append(sketch(tensor, offset))
        return len(self._rows) - 1

    def add_sum(self, *rows: int) -> int:
        """Add the row of a sum of tensors whose rows are known, and return its number.

        The sum of its squares is the estimate of the sketch.
        """
        total = np.sum([self._rows[row] for row in rows], axis=0)
        total[SQUARES] = np.square(total[:SKETCH_SIZE]).sum()
        total[CHECKSUM] %= float(1 << 53)
        self._rows.append(total)
        return len(self._rows) - 1

    def array(self) -> NDArray[np.float64]:
        """Return all rows, of shape (rows, ROW_SIZE)."""
        return np.array(self._rows) if self._rows else np.zeros((0, ROW_SIZE))
