"""Files of tensors: safetensors, and those of ``torch.save``.

A safetensors file is a JSON header, then the bytes of the tensors one after the other. The writer
of the library safetensors takes all tensors at once, in memory. This one takes them one by one, so
that a model larger than the memory can be written. The reader maps the file; it needs no package,
and its errors name the file. A file of ``torch.save`` is checked before ``torch.load`` maps it.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...security.files import InvalidFileError, open_regular
from ...security.folders import NewFile
from ...security.schema import load_json
from ..manifest import DamagedCheckpointError, check_archive, map_archive, name_damage

MAX_HEADER_BYTES = 100_000_000  # that readers accept
MAX_PARSED_HEADER_BYTES = 512 << 20  # some 400,000 tensors
MAX_DEPTH = 100
MAX_PARTS = 10_000_000
_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], torch.Tensor],
) -> int:
    """Write a safetensors file, which gets its name when it is complete. Return its bytes.

    Args:
        path: The file.
        shapes: Shape and dtype of each tensor by its name.
        read: Function that returns a tensor on the CPU by its name.

    Raises:
        ValueError: The format does not have a tensor's dtype, or there are too many tensors.
        OSError: The file can't be written.
    """
    # larger items first, so that each tensor begins at a multiple of its item size
    names = sorted(shapes, key=lambda name: -shapes[name][1].itemsize)
    head, end = _header(names, shapes)
    with NewFile(path) as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        for name in names:
            tensor = read(name).contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == shapes[name]
            if tensor.numel():
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        os.fsync(file.fd)
    return 8 + len(head) + end


def _header(
    names: Iterable[str], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> tuple[bytes, int]:
    """Return the header, and the bytes of all tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape, dtype = shapes[name]
        if dtype not in _DTYPES or name == "__metadata__":
            raise ValueError(
                f"{name} ({dtype}) can't be stored in a safetensors file. HINT: choose a file "
                "name that ends with .pt"
            )
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError("the model has too many tensors for a safetensors file. HINT: write a .pt")
    return head, end


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by their names, mapped into memory.

    Raises:
        DamagedCheckpointError: The file can't be read, or is not a valid safetensors file.
    """
    with name_damage(path), open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise DamagedCheckpointError(path, "is not a safetensors file")
        entries = _read_entries(file.read(length), path)
        # The path is that of the checked descriptor, because torch maps no file objects.
        content = torch.from_file(f"/dev/fd/{file.fileno()}", size=size, dtype=torch.uint8)
    places = {name: _place(name, entry, path) for name, entry in entries.items()}
    end = 8 + length
    for place in sorted(places.values(), key=lambda place: (place.begin, place.end)):
        if 8 + length + place.begin < end:
            raise DamagedCheckpointError(path, "has two tensors in one place")
        end = 8 + length + place.end
    if end > size:
        raise DamagedCheckpointError(path, f"has only {size:,} of {end:,} bytes")
    return {name: _mapped(content, 8 + length, place) for name, place in places.items()}


def _read_entries(head: bytes, path: Path) -> dict[str, object]:
    try:
        header = load_json(head, path, MAX_PARSED_HEADER_BYTES)
    except InvalidFileError as error:
        raise DamagedCheckpointError(path, f"has a header that {error.reason}") from None
    if not isinstance(header, dict):
        raise DamagedCheckpointError(path, "has a header that lists no tensors")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


class _Place(NamedTuple):
    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _place(name: str, entry: object, path: Path) -> _Place:
    given = entry if isinstance(entry, dict) else {}
    dtype = given.get("dtype")
    shape, offsets = _numbers(given.get("shape")), _numbers(given.get("data_offsets"))
    if shape is None or offsets is None:
        raise DamagedCheckpointError(path, f"has no shape or place of {name[:80]!r}")
    if not isinstance(dtype, str) or dtype not in _TORCH_DTYPES:
        raise DamagedCheckpointError(path, f"has a dtype of {name[:80]!r} that PyTorch lacks")
    found = _TORCH_DTYPES[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * found.itemsize:
        raise DamagedCheckpointError(path, f"has another size than shape of {name[:80]!r}")
    return _Place(offsets[0], offsets[1], shape, found)


def _numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        return None
    return tuple(value)


def _mapped(content: torch.Tensor, start: int, place: _Place) -> torch.Tensor:
    part = content[start + place.begin : start + place.end]
    if part.storage_offset() % place.dtype.itemsize:  # such a file is allowed, though rare
        part = part.clone()
    return part.view(place.dtype).view(place.shape)


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
