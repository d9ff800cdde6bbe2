"""The file ``.metadata`` of torch.distributed.checkpoint beside the file of a rank.

Its names and numbers choose what is read of the rank's file. All memory that follows from them is
limited by the sizes of the files.
"""

import warnings
from collections.abc import Iterator

import torch
import torch.distributed.checkpoint as dcp

from fuzz.scratch import new_folder
from paceline.checkpoint import other_formats
from paceline.checkpoint.other_formats import METADATA, load_dcp
from paceline.checkpoint.sharded_tensor import whole

other_formats.MAX_OPCODES, other_formats.MAX_OBJECTS = 10_000, 10_000
warnings.simplefilter("ignore")
FOLDER = new_folder() / "dcp"
STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "step": 3}


def seeds() -> Iterator[bytes]:
    metadata = _metadata()
    yield metadata
    yield metadata.replace(b"model.w", b"model.b")


def run(data: bytes) -> None:
    if not FOLDER.exists():
        _metadata()
    (FOLDER / METADATA).write_bytes(data)
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    tensors = load_dcp(FOLDER)
    assert sum(whole(tensor).nbytes for tensor in tensors.values()) <= size


def _metadata() -> bytes:
    """Write the folder; return its metadata."""
    dcp.save({"model": STATE}, checkpoint_id=FOLDER)
    return (FOLDER / METADATA).read_bytes()
