"""Input data: packed datasets, their loader, and the assignment of samples to ranks.

The order of the samples does not depend on the number of ranks.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .format.shard_format import DataError
    from .loading.file_dataset import Files
    from .loading.loader import Loader
    from .packing.pack import pack
    from .shards import Shards

__all__ = ["DataError", "Files", "Loader", "Shards", "pack"]
_WHERE = {
    "DataError": "format.shard_format",
    "Files": "loading.file_dataset",
    "Loader": "loading.loader",
    "Shards": "shards",
    "pack": "packing.pack",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that packing starts without importing torch.
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
