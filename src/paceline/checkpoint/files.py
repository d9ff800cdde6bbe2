"""The folder of a checkpoint: shards, a manifest with their checksums, and one rename.

    DIR/step-00001200/rank-00000.pt ... manifest.json     whole
    DIR/.step-00001500.7.tmp/                             being written; never read

A checkpoint exists only under its final name, and it gets that name by one rename after
everything in it was flushed to the disk. The previous one stays beside it.
"""

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from .manifest import (
    MANIFEST,
    VERSION,
    DamagedError,
    Manifest,
    checksum,
    read_manifest,
    read_shard,
    verify_shard,
)

__all__ = ["MANIFEST", "DamagedError", "found", "read_manifest", "read_shard", "verify"]

_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,17})")  # as the saver names them


class _Checked:
    """A file that counts and checksums what is written through it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.bytes = 0
        self.crc = 0
        self.error: OSError | None = None  # torch says something else of it

    def write(self, data: Any) -> int:
        self.bytes += len(data)
        self.crc = zlib.crc32(data, self.crc)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def write_shard(folder: Path, rank: int, state: Any) -> dict[str, Any]:
    """Write and flush one rank's shard; its manifest entry (name, bytes, crc32)."""
    path = folder / f"rank-{rank:05}.pt"
    with path.open("wb") as file:
        checked = _Checked(file)
        try:
            torch.save(state, cast(Any, checked))
        except RuntimeError:
            if checked.error is not None:
                raise checked.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "bytes": checked.bytes, "crc32": checked.crc}


def commit(folder: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, flush everything, and give the checkpoint its name."""
    body = {"format": "paceline-checkpoint", "version": VERSION, **manifest}
    body["check"] = checksum(body)
    path = folder / MANIFEST
    with path.open("w") as file:
        json.dump(body, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(folder)
    old = final.with_name(f".{final.name}.old.tmp")
    if final.exists():  # the same step again: at an epoch's end, or after a restart
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    folder.rename(final)
    _flush_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def verify(folder: Path) -> Manifest:
    """Return the manifest of a whole checkpoint. Every byte is read.

    Raises:
        DamagedError: A file of it is missing or damaged; the error names it.
    """
    manifest = read_manifest(folder)
    for entry in manifest["files"]:
        verify_shard(folder, entry)
    return manifest


def found(directory: Path) -> list[Path]:
    """Checkpoints in ``directory``, the newest first; not yet verified."""
    if not directory.is_dir():
        return []
    names = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(names, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def remove_old(directory: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints."""
    for path in found(directory)[keep:]:
        shutil.rmtree(path, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Remove what interrupted writes left; only while nobody writes."""
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def check_writable(directory: Path) -> None:
    """Raise ValueError now rather than at the first save."""
    probe = directory / f".probe-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"x")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"checkpoints can't be written to {directory}: {error.strerror}. "
            "HINT: another folder in world.epochs(..., checkpoint=...)"
        ) from None
