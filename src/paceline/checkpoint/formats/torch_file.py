"""Tensors in a file of ``torch.save``, checked before ``torch.load`` maps it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...security.files import open_regular
from ..manifest import DamagedCheckpointError, check_archive, map_archive, name_damage

MAX_DEPTH = 100
MAX_PARTS = 10_000_000


def load_torch_file(path: Path) -> dict[str, Any]:
    """Return the values of a file by their names; names in nested containers are joined by dots.

    Tensors are mapped, not read. Those that share memory (tied weights) are one object.

    Raises:
        DamagedCheckpointError: The file can't be read, or contains other objects than tensors,
            numbers, texts and containers.
    """
    with name_damage(path), open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            check_archive(file, size, path, of_models=True)
        except DamagedCheckpointError as error:
            hint = "HINT: torch.save(model.state_dict(), FILE) writes a file that can be converted"
            raise DamagedCheckpointError(path, f"{error.reason}. {hint}") from None
        content = map_archive(file)
    if isinstance(content, torch.Tensor):
        content = {"tensor": content}
    found: dict[str, Any] = {}
    for count, (name, value) in enumerate(_named(content, "", 0, path), 1):
        if count > MAX_PARTS:
            raise DamagedCheckpointError(path, f"has over {MAX_PARTS:,} values")
        if name in found:
            raise DamagedCheckpointError(path, f"has two values of the name {name[:80]!r}")
        found[name] = value
    return _shared(found, size, path)


def _named(value: Any, name: str, depth: int, path: Path) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise DamagedCheckpointError(path, f"nests over {MAX_DEPTH} levels")
    if isinstance(value, dict | list | tuple) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _named(item, f"{name}.{key}" if name else str(key), depth + 1, path)
    else:
        yield name, value


def _shared(values: dict[str, Any], size: int, path: Path) -> dict[str, Any]:
    """Return the values with one object for tensors that are the same part of the same storage."""
    first: dict[tuple[Any, ...], torch.Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in values.items():
        strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if strided and not value.is_nested:
            tensor = value.detach()
            where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            found[name] = first.setdefault(where, tensor)
        else:
            found[name] = value
    if sum(tensor.numel() * tensor.element_size() for tensor in first.values()) > size:
        reason = "has tensors that overlap in memory. HINT: save clones of them"
        raise DamagedCheckpointError(path, reason)
    return found
