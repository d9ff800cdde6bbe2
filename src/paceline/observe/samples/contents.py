"""Checksums of samples, and what is known of a dataset without reading it."""

import zlib
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset

from ...record.hooks.batch_size import fields_of

MAX_TENSORS = 8  # of a batch
MAX_SUBSETS = 8  # nested
MAX_POSITIONS = 1 << 18
ROOT_SAMPLES = 64  # of a dataset of tensors


def sample_checksums(batch: Any, samples: int) -> list[list[int]]:
    """Return, for each tensor of a batch with ``samples`` rows, a checksum of each row."""
    found: list[list[int]] = []
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, torch.Tensor):
            found += _object_checksums(leaf, samples)
        elif _has_rows(leaf) and len(leaf) == samples:
            found.append(row_checksums(leaf))
    return found[:MAX_TENSORS]


def _has_rows(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return is_tensor and not value.is_nested and value.ndim > 0 and len(value) > 0


def _object_checksums(batch: Any, samples: int) -> list[list[int]]:
    """Return the checksums of an object with tensors, such as graphs that are joined to one.

    Its tensor ``batch`` has the number of its graph for each node, in order.
    """
    values = fields_of(batch)
    owners: Any = values.get("batch")
    found: list[list[int]] = []
    is_joined = _has_rows(owners) and owners.ndim == 1
    nodes = torch.bincount(owners.cpu(), minlength=samples).tolist() if is_joined else []
    for name, value in values.items():
        if not _has_rows(value) or name in ("batch", "ptr"):
            continue
        if is_joined and len(value) == len(owners):
            found.append([zlib.crc32(_bytes(part)) for part in value.split(nodes)])
        elif len(value) == samples:
            found.append(row_checksums(value))
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def row_checksums(tensor: torch.Tensor) -> list[int]:
    """Return a checksum of each row of a tensor."""
    plain = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    if not plain.numel():
        return [0] * len(tensor)
    data = plain.view(torch.uint8).numpy()
    return [zlib.crc32(row) for row in data]


def length_of(dataset: Any) -> int | None:
    """Return the length of a dataset or loader; None if it has none, or its method fails."""
    try:
        return len(dataset)
    except Exception:  # of the script's own class
        return None


def describe_dataset(dataset: Any) -> dict[str, Any]:
    """Return what is known of a dataset, and of the innermost one: fields of ``LoaderFacts``.

    Attributes with a value for each sample are read (tensors, arrays, tables, lists of paths), but
    no samples: reading these may draw random numbers.
    """
    found = {"dataset": type(dataset).__name__, "dataset_length": length_of(dataset)}
    positions: list[int] | None = None
    checksum, is_subset = 0, True  # of the indices of a Subset, also of nested ones
    for _ in range(MAX_SUBSETS):
        indices = getattr(dataset, "indices", None)
        if indices is None or not hasattr(dataset, "dataset"):
            break
        is_subset = is_subset and isinstance(dataset, Subset)
        if is_subset:
            checksum = zlib.crc32(",".join(map(str, indices)).encode(), checksum)
        listed = [int(index) for index in indices]
        positions = listed if positions is None else [listed[at] for at in positions]
        dataset = dataset.dataset
    length = length_of(dataset)
    return found | {
        "dataset_checksum": checksum,
        "subset": None if positions and len(positions) > MAX_POSITIONS else positions,
        "root_length": length,
        "root_checksum": _state_checksum(dataset, length) if length else 0,
    }


def _state_checksum(dataset: Any, length: int) -> int:
    """Return a checksum of a dataset's attributes with one value for each sample; 0 without any."""
    checksum = 0
    rows = list(range(0, length, max(length // ROOT_SAMPLES, 1)))
    if isinstance(dataset, list | tuple):
        text = _rows_as_text(dataset, rows, length)
        return zlib.crc32(text.encode(errors="replace")) if text else 0
    for name, attribute in sorted(getattr(dataset, "__dict__", {}).items()):
        values = attribute if name == "tensors" else (attribute,)
        for value in values:
            text = _rows_as_text(value, rows, length)
            checksum = zlib.crc32(text.encode(errors="replace"), checksum) if text else checksum
    return checksum


def _rows_as_text(value: Any, rows: list[int], length: int) -> str:
    """Return some rows of a value that has ``length``; "" if it has not, or they are objects."""
    try:
        if len(value) != length:
            return ""
        if isinstance(value, torch.Tensor):
            return repr(row_checksums(value[rows]))
        if hasattr(value, "iloc"):  # a table of pandas
            return repr(value.iloc[rows].to_numpy().tolist())
        if isinstance(value, np.ndarray):
            return repr(value[rows].tolist()) if value.dtype != object else ""
        if isinstance(value, list | tuple):
            found = [_plain(value[at]) for at in rows]
            return "" if None in found else repr(found)
    except Exception:  # of the script's own class
        return ""
    return ""


def _plain(value: Any) -> str | None:
    """Return a text that is equal for equal values of two processes; None for other objects."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {row_checksums(value[None])}"
    if isinstance(value, np.ndarray):
        return repr(value.tolist()) if value.dtype != object else None
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        parts = [_plain(one) for one in value]
        return None if None in parts else repr(parts)
    is_known = isinstance(value, str | bytes | int | float | PurePath | np.generic | None)
    return repr(value) if is_known else None
