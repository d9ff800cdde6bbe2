"""Keys of a checkpoint's tree as JSON, in which ranks exchange them.

Keys are numbers, strings, None, bytes and tuples of them. JSON has no bytes and no tuples.
"""

from collections.abc import Mapping
from typing import Any

Digests = list[tuple[list[Any], bytes]]  # paths, as JSON, with their digests


def path_to_json(path: tuple[Any, ...]) -> list[Any]:
    """Return a path as a list of numbers, strings, None and dicts with one item."""
    return [_to_json(key) for key in path]


def path_from_json(keys: list[Any]) -> tuple[Any, ...]:
    """Return the path. Raises ValueError if ``keys`` are not of ``path_to_json``."""
    return tuple(_from_json(key) for key in keys)


def digests_to_json(digests: Mapping[tuple[Any, ...], bytes]) -> Digests:
    """Return digests by path as a list."""
    return [(path_to_json(path), digest) for path, digest in digests.items()]


def digests_from_json(items: Digests) -> dict[tuple[Any, ...], bytes]:
    """Return digests by path. Raises ValueError same as for ``path_from_json``."""
    return {path_from_json(keys): digest for keys, digest in items}


def _to_json(key: Any) -> Any:
    if isinstance(key, tuple):
        return {"tuple": path_to_json(key)}
    return {"bytes": key.hex()} if isinstance(key, bytes) else key


def _from_json(key: Any) -> Any:
    match key:
        case {"tuple": list(parts)}:
            return path_from_json(parts)
        case {"bytes": str(digits)}:
            return bytes.fromhex(digits)
        case dict() | list():
            raise ValueError(f"{key!r} is not a key of a checkpoint's tree")
    return key
