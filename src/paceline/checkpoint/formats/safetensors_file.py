"""Writing a safetensors file: a JSON header, then the bytes of the tensors one after the other.

The writer of the library safetensors takes all tensors at once, in memory. This one takes them one
by one, so that a model larger than the memory can be written.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path

import torch

from ...security.folders import NewFile

MAX_HEADER_BYTES = 100_000_000  # that readers accept
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
