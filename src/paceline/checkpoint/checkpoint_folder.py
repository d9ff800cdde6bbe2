"""The folder of a checkpoint: shards, a manifest with their checksums, and one rename.

    DIR/step-00001200/rank-00000.pt ... manifest.json     whole
    DIR/.step-00001500.7.tmp/                             being written; never read

A checkpoint exists only under its final name, and it gets that name by one rename after
everything in it was flushed to the disk. The previous one stays beside it.
"""

import errno
import json
import os
import re
import secrets
import stat
import tempfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from ..security.files import kind_of_file
from .manifest import (
    MANIFEST,
    VERSION,
    DamagedCheckpointError,
    Manifest,
    check_readable,
    checksum,
    read_manifest,
    read_shard,
    verify_shard,
)
from .unfinished_folder import UnfinishedFolder, remove

__all__ = [
    "MANIFEST",
    "DamagedCheckpointError",
    "list_checkpoints",
    "read_manifest",
    "read_shard",
    "verify",
]

_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,17})")  # as the saver names them


class _ChecksummingFile:
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


def write_shard(folder: UnfinishedFolder, rank: int, state: Any) -> dict[str, Any]:
    """Write and flush one rank's shard; its manifest entry (name, bytes, crc32).

    Raises:
        UnsafeFileError: The folder belongs to another user.
        OSError: The shard can't be written.
        ValueError: The shard is larger than what ``read_shard`` reads.
    """
    name = f"rank-{rank:05}.pt"
    with folder.new_file(name) as new:
        with open(new.fd, "wb", closefd=False) as file:
            checked = _ChecksummingFile(file)
            try:
                torch.save(state, cast(Any, checked))
            except RuntimeError:
                if checked.error is not None:
                    raise checked.error from None
                raise
        os.fsync(new.fd)
    check_readable(folder.path / name, folder.fd)
    return {"name": name, "bytes": checked.bytes, "crc32": checked.crc}


def commit(folder: UnfinishedFolder, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, flush everything, and give the checkpoint its name.

    Raises:
        UnsafeFileError: The folder belongs to another user, or was replaced.
        FileExistsError: A file has the name of the checkpoint.
        OSError: The checkpoint can't be written.
    """
    body = {"format": "paceline-checkpoint", "version": VERSION, **manifest}
    body["check"] = checksum(body)
    with folder.new_file(MANIFEST) as file:
        file.write(json.dumps(body, indent=1).encode())
        os.fsync(file.fd)
    # Nobody can have made something of this name before.
    old = final.with_name(f".{final.name}.{secrets.token_hex(8)}.old.tmp")
    if os.path.lexists(final):  # the same step again: at an epoch's end, or after a restart
        mode = final.lstat().st_mode
        if not stat.S_ISDIR(mode) and not stat.S_ISLNK(mode):
            reason = f"{final.name} is {kind_of_file(mode)} and no folder"
            raise FileExistsError(errno.EEXIST, reason, str(final))
        final.rename(old)
    folder.rename(final)
    _flush_folder(final.parent)
    remove(old)


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


def list_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints in ``directory``, the newest first; not yet verified."""
    if not directory.is_dir():
        return []
    names = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(names, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def remove_old(directory: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints."""
    for path in list_checkpoints(directory)[keep:]:
        remove(path)


def remove_unfinished(directory: Path) -> None:
    """Remove what interrupted writes left; only while nobody writes."""
    for path in directory.glob(".step-*.tmp"):
        remove(path)


def check_writable(directory: Path) -> None:
    """Raise ValueError now rather than at the first save."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            os.write(probe.fileno(), b"x")
    except OSError as error:
        raise ValueError(
            f"checkpoints can't be written to {directory}: {error.strerror}. "
            "HINT: another folder in world.epochs(..., checkpoint=...)"
        ) from None
