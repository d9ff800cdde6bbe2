"""The header of a safetensors file, which ``paceline convert`` reads."""

from collections.abc import Iterator

import torch

from fuzz.scratch import new_folder
from paceline.checkpoint.other_formats import read_safetensors, write_safetensors
from paceline.checkpoint.sharded_tensor import whole

FILE = new_folder() / "model.safetensors"
TENSORS = {
    "w": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4, dtype=torch.bool),
}


def seeds() -> Iterator[bytes]:
    shapes = {name: (tuple(one.shape), one.dtype) for name, one in TENSORS.items()}
    write_safetensors(FILE, shapes, TENSORS.__getitem__)
    yield FILE.read_bytes()
    yield FILE.read_bytes().replace(b"BF16", b"BOOL")


def run(data: bytes) -> None:
    FILE.write_bytes(data)
    tensors = read_safetensors(FILE)
    assert sum(whole(tensor).nbytes for tensor in tensors.values()) <= len(data)
