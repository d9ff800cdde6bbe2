"""The pickle of a shard: torch loads what passes the check in bounded time and memory."""

import io
import warnings
import zipfile
from collections.abc import Iterator

import torch

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import check_pickle

manifest.MAX_PICKLE_BYTES, manifest.MAX_OPCODES, manifest.MAX_KEY_PARTS = (
    1 << 16,
    10_000,
    10_000,
)
warnings.simplefilter("ignore")
RECORDS = {"0": b"\0" * 12, "1": b"\0" * 8}
STATES = (
    torch.nn.Linear(3, 2).state_dict(),
    torch.nn.Parameter(torch.ones(3)),
    [torch.ones(3), {"a": (1, (2.5, None)), b"k": [True, 1j]}, {1, (2, 3)}],
    [torch.ones(3), b"", b"bytes", 1 << 70, torch.Size([2]), torch.float16, torch.device("cpu")],
    [torch.ones(6, dtype=torch.uint16), torch.ones(1, dtype=torch.int64)],
)


def seeds() -> Iterator[bytes]:
    for state in STATES:
        file = io.BytesIO()
        torch.save(state, file)
        with zipfile.ZipFile(file) as archive:
            yield archive.read("archive/data.pkl")


def run(data: bytes) -> None:
    check_pickle(data, {key: len(record) for key, record in RECORDS.items()}, of_models=True)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        for key, record in RECORDS.items():
            archive.writestr(f"archive/data/{key}", record)
    file.seek(0)
    try:
        with torch.serialization.safe_globals([bytes]):
            torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # read_shard then reports that the shard is damaged
        return
