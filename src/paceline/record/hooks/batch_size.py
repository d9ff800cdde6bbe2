"""Count the samples of a batch, and compare batches of different ranks."""

import ctypes
import zlib
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

FINGERPRINT_PARTS, FINGERPRINT_PART_BYTES = 16, 256  # spread over a batch's first tensor
MAX_NESTED_CONTAINERS = 8
GRAPH_COUNTS = ("num_graphs", "batch_size")  # attributes of PyTorch Geometric and DGL


def samples_in(batch: Any) -> int:
    """Return the number of samples: the first tensor's leading dimension, or a list's length.

    Of graphs that are joined to one, their number.
    """
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, (list, tuple)):
        if not batch:
            return 1
        first = batch[0]
        inside = isinstance(first, (torch.Tensor, list, tuple, Mapping)) or bool(graphs_in(first))
        # A list may have one object for each sample.
        inside = inside or (isinstance(batch, tuple) and bool(fields_of(first)))
        return samples_in(first) if inside else len(batch)
    if count := graphs_in(batch):
        return count
    fields = batch if isinstance(batch, Mapping) else fields_of(batch)
    held = next((field for field in fields.values() if _holds_samples(field)), None)
    return samples_in(held) if held is not None else 1


def _holds_samples(field: Any) -> bool:
    """Return whether a field of a batch may have samples: a name or a number has none."""
    if isinstance(field, torch.Tensor):
        return field.ndim > 0
    is_container = isinstance(field, (list, tuple, Mapping)) and len(field) > 0
    return is_container or bool(graphs_in(field) or fields_of(field))


def fields_of(batch: Any) -> dict[str, Any]:
    """Return the fields of an object that holds tensors, such as graphs that are joined to one.

    Those of any other value are {}.
    """
    if graphs_in(batch) and hasattr(batch, "to_dict"):
        return dict(batch.to_dict())
    if isinstance(batch, type | torch.Tensor | torch.nn.Module):
        return {}
    fields = getattr(batch, "__dict__", {})
    holds = is_dataclass(batch) or any(isinstance(field, torch.Tensor) for field in fields.values())
    return dict(fields) if holds else {}


def graphs_in(batch: Any) -> int:
    """Return the number of graphs that an object joins; 0 if it is none of graphs."""
    counts = [getattr(batch, name, None) for name in GRAPH_COUNTS]
    return next((count for count in counts if type(count) is int), 0)


def fingerprint_of(batch: Any) -> int:
    """Return a checksum of parts of the batch's first tensor; 0 if it has none in host memory.

    No operator of torch runs: a script's dispatch mode must not see one. A batch without any bit
    set has no fingerprint.
    """
    for _ in range(MAX_NESTED_CONTAINERS):
        if not isinstance(batch, (list, tuple, Mapping)) or not batch:
            break
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    if type(batch) is not torch.Tensor or batch.device.type != "cpu":
        return 0
    if batch.layout != torch.strided or not batch.is_contiguous():
        return 0
    size, address = batch.nbytes, batch.data_ptr()
    if not size or not address:
        return 0
    checksum, is_empty = zlib.crc32(str(size).encode()), True
    distance = max(size // FINGERPRINT_PARTS, FINGERPRINT_PART_BYTES)
    for offset in range(0, size, distance):
        part = ctypes.string_at(address + offset, min(FINGERPRINT_PART_BYTES, size - offset))
        checksum = zlib.crc32(part, checksum)
        is_empty = is_empty and not any(part)
    return 0 if is_empty else checksum
