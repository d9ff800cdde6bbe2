"""Checksums of samples, and what is known of a dataset without reading it."""

import zlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

MAX_TENSORS = 8  # of a batch
MAX_SUBSETS = 8  # nested
MAX_POSITIONS = 1 << 18
ROOT_SAMPLES = 64  # of a dataset of tensors


def sample_checksums(batch: Any, samples: int) -> list[list[int]]:
    """Return, for each tensor of a batch with ``samples`` rows, a checksum of each row."""
    found: list[list[int]] = []
    for leaf in tree_leaves(batch):
        if len(found) == MAX_TENSORS:
            break
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != samples:
            continue
        if leaf.layout == torch.strided and not leaf.is_nested and samples:
            found.append(_row_checksums(leaf))
    return found


def _row_checksums(tensor: torch.Tensor) -> list[int]:
    plain = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    if not plain.numel():
        return [0] * len(tensor)
    data = plain.view(torch.uint8).numpy()
    return [zlib.crc32(row) for row in data]


def describe_root(dataset: Any) -> dict[str, Any]:
    """Return what is known of the innermost dataset: the fields of ``LoaderFacts``.

    Contents are read of tensors only: reading others may draw random numbers.
    """
    positions: list[int] | None = None
    for _ in range(MAX_SUBSETS):
        indices = getattr(dataset, "indices", None)
        if indices is None or not hasattr(dataset, "dataset"):
            break
        listed = [int(one) for one in indices]
        positions = listed if positions is None else [listed[one] for one in positions]
        dataset = dataset.dataset
    try:
        length = len(dataset)
    except Exception:  # no length, or a method that fails
        length = None
    checksum = 0
    for tensor in getattr(dataset, "tensors", ()):
        if isinstance(tensor, torch.Tensor) and tensor.ndim:
            first = _row_checksums(tensor[:ROOT_SAMPLES])
            checksum = zlib.crc32(repr(first).encode(), checksum)
    if positions is not None and len(positions) > MAX_POSITIONS:
        positions = None
    return {"subset": positions, "root_length": length, "root_checksum": checksum}


def checksum_of_indices(dataset: Any, subset: type) -> int:
    """Return a checksum of the indices of a ``Subset``, also of nested ones; 0 without any."""
    checksum = 0
    for _ in range(MAX_SUBSETS):
        if not isinstance(dataset, subset):
            break
        indices: Any = dataset.indices  # type: ignore[attr-defined]
        text = ",".join(map(str, indices))
        checksum = zlib.crc32(text.encode(), checksum)
        dataset = dataset.dataset  # type: ignore[attr-defined]
    return checksum
