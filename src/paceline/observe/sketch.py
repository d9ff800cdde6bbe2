"""Sketches of tensors: few numbers that show whether a tensor is a sum or a multiple of others.

A sketch is a linear map of the flattened tensor onto ``SKETCH_SIZE`` numbers (Charikar, Chen and
Farach-Colton, "Finding frequent items in data streams", 2002): each element is added, with a random
sign, to one of them. Sign and position depend on the index of the element only. So the sketch of a
mean is the mean of the sketches, on every rank, and the sketch of a sharded tensor is the sum of
those of its shards. The sum of the squares of a difference of two sketches estimates that of the
tensors.
"""

import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .sketch_rows import CHECKSUM, NONFINITE, ROW_SIZE, SKETCH_SIZE, SQUARES

_CHUNK = 1 << 20  # elements at a time; a multiple of SKETCH_SIZE
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIXER = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MAX_KEPT_SIGNS = 1 << 26  # bytes


def sketch(tensor: torch.Tensor, offset: int = 0) -> NDArray[np.float64]:
    """Return the row of a tensor, or of a shard of it.

    Args:
        tensor: Any shape, dtype and device; complex values count as pairs.
        offset: Position of the first element in the flattened whole tensor.

    Returns:
        ``ROW_SIZE`` numbers. Elements that are not finite count as 0 in the first two parts.
    """
    row = torch.zeros(ROW_SIZE, dtype=torch.float64, device="cpu")
    checksums = (0, 1)
    with torch.no_grad():
        values = tensor.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        flat = values.reshape(-1)
        # Chunks begin at the same positions of the whole tensor, whatever the offset is.
        start = 0
        while start < flat.numel():
            end = min(start + _CHUNK - (offset + start) % _CHUNK, flat.numel())
            part = flat[start:end].cpu().contiguous()
            data: Any = part.view(torch.uint8).numpy()
            checksums = zlib.crc32(data, checksums[0]), zlib.adler32(data, checksums[1])
            _add(row, part.to(torch.float64), offset + start)
            start = end
    row[CHECKSUM] = checksums[0] + ((checksums[1] & 0x1FFFFF) << 32)
    return row.numpy()


def _add(row: torch.Tensor, part: torch.Tensor, first: int) -> None:
    squares = torch.dot(part, part)
    if not squares.isfinite():
        finite = part.isfinite()
        row[NONFINITE] += part.numel() - int(finite.sum())
        part = torch.where(finite, part, torch.zeros_like(part))
        squares = torch.dot(part, part)
    row[SQUARES] += squares
    before = first % SKETCH_SIZE
    after = -(before + part.numel()) % SKETCH_SIZE
    signed = torch.nn.functional.pad(part * _signs(first, part.numel()), (before, after))
    row[:SKETCH_SIZE] += signed.reshape(-1, SKETCH_SIZE).sum(0)


_signs_of_chunks: dict[int, torch.Tensor] = {}


def _signs(first: int, count: int) -> torch.Tensor:
    """Return a random sign for each of the elements from position ``first`` on, as int8."""
    chunk, start = first // _CHUNK, first % _CHUNK
    found = _signs_of_chunks.get(chunk)
    if found is None or len(found) < start + count:
        # Small tensors need the first few signs only.
        size = min(max(2 * (start + count), 1 << 12), _CHUNK)
        hashed = torch.arange(size, dtype=torch.int64, device="cpu") + chunk * _CHUNK
        hashed = hashed * _MULTIPLIER
        hashed = (hashed ^ (hashed >> 29)) * _MIXER
        found = (((hashed >> 50) & 1) * 2 - 1).to(torch.int8)
        if len(_signs_of_chunks) * _CHUNK < _MAX_KEPT_SIGNS:
            _signs_of_chunks[chunk] = found
    return found[start : start + count]


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

    def are_equal(self, one: int, other: int) -> bool:
        """Return whether two rows are those of equal tensors."""
        return bool(self._rows[one][CHECKSUM] == self._rows[other][CHECKSUM])

    def array(self) -> NDArray[np.float64]:
        """Return all rows, of shape (rows, ROW_SIZE)."""
        return np.array(self._rows) if self._rows else np.zeros((0, ROW_SIZE))
