"""Open what a user gives to a Loader: its dataset, and the sampler of its order."""

import os
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ..sampling.samplers import BLOCK_BYTES, BlockShuffled, Ordered, Shuffled
from ..shards import Shards
from .array_dataset import ArrayDataset
from .concat_dataset import ConcatDataset
from .file_dataset import Files
from .stored_arrays import StoredArrays, is_stored_array


def open_dataset(source: Any) -> Any:
    """Return the dataset of a source: a folder, files, arrays, or a list of sources.

    Raises:
        ValueError: The source is of another kind.
    """
    if is_stored_array(source):
        return StoredArrays(source)
    if isinstance(source, (str, os.PathLike)):
        return Shards(source)
    if isinstance(source, tuple) and len(source) == 2 and is_stored_array(source[0]):
        return StoredArrays(*source)
    if isinstance(source, (Shards, ArrayDataset, ConcatDataset, StoredArrays, Files)):
        return source
    if isinstance(source, list) and source:
        return ConcatDataset([open_dataset(one) for one in source])
    if isinstance(source, TensorDataset):
        source = source.tensors
    if isinstance(source, tuple) and len(source) in (1, 2):
        return ArrayDataset(*source)
    if isinstance(source, (np.ndarray, torch.Tensor)):
        return ArrayDataset(source)
    raise ValueError(
        f"Loader: {type(source).__name__} is not a source. HINT: pass a packed dataset's "
        "folder, an HDF5, netCDF or zarr file, or arrays x or (x, y). For other datasets use "
        "torch's DataLoader"
    )


def make_sampler(dataset: Any, shuffle: bool | str, seed: int) -> Ordered:
    """Return the sampler for ``Loader(shuffle=...)``.

    Raises:
        ValueError: ``shuffle`` is not True, False or "blocks".
    """
    if shuffle not in (True, False, "blocks"):
        raise ValueError(
            f"Loader: shuffle must be True, False or 'blocks'; this is {shuffle!r}. HINT: "
            "shuffle=True"
        )
    if shuffle == "blocks" and isinstance(dataset, Shards):
        each = max(dataset.meta.bytes / len(dataset), 1)
        return BlockShuffled(len(dataset), int(BLOCK_BYTES / each), seed)
    if shuffle == "blocks" and isinstance(dataset, StoredArrays):
        return dataset.in_blocks(seed)
    if shuffle and isinstance(dataset, StoredArrays):
        dataset.fights()
    return (Shuffled if shuffle else Ordered)(len(dataset), seed)
