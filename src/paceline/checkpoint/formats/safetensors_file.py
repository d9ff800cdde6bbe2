"""A safetensors file: a JSON header, then the bytes of the tensors one after the other.

The writer of the library safetensors takes all tensors at once, in memory. This one takes them one
by one, so that a model larger than the memory can be written. The reader maps the file; it needs no
package, and its errors name the file.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from ...security.files import InvalidFileError, open_regular
from ...security.folders import NewFile
from ...security.schema import load_json
from ..manifest import DamagedCheckpointError, name_damage

MAX_HEADER_BYTES = 100_000_000  # that readers accept
MAX_PARSED_HEADER_BYTES = 512 << 20  # some 400,000 tensors
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
