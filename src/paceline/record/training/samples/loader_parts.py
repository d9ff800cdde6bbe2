"""Parts of loaders: the user's sampler and dataset, and indices as numbers."""

import zlib
from typing import Any


def sampler_of(loader: Any) -> Any:
    """Return the sampler of a loader that orders samples, also inside of batch samplers."""
    sampler, outer = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    found: Any = outer
    while hasattr(found, "batch_sampler"):
        found = found.batch_sampler  # as in accelerate's
    inside = getattr(found, "sampler", None)
    if outer is None or inside is sampler:
        return sampler
    return inside if inside is not None else found


def dataset_of(loader: Any) -> Any:
    """Return the user's dataset."""
    dataset = loader.dataset
    is_ours = type(dataset).__module__.startswith("paceline.")
    return getattr(dataset, "dataset", dataset) if is_ours else dataset  # a Loader's wraps none


def listed(index: Any) -> list[int]:
    """Return the indices of a batch as a list, whatever the sampler returns."""
    if hasattr(index, "tolist"):
        index = index.tolist()
    return [_number(one) for one in (index if isinstance(index, list | tuple) else [index])]


def _number(index: Any) -> int:
    """Return an index as a number; a checksum of other keys."""
    if isinstance(index, tuple) and len(index) == 2 and all(type(x) is int for x in index):
        return int(index[1])  # world.shard: with the epoch
    try:
        return int(index)
    except (TypeError, ValueError):
        return zlib.crc32(repr(index).encode())


def known(indices: list[list[int] | None]) -> list[list[int]]:
    return [one for one in indices if one is not None]


def length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # no length, or a method that fails
        return None
