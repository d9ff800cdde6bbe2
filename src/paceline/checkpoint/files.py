"""The folder of a checkpoint: shards, a manifest with their checksums, and one rename.

    DIR/step-00001200/rank-00000.pt ... manifest.json     whole
    DIR/.step-00001500.7.tmp/                             being written; never read

A checkpoint exists only under its final name, and it gets that name by one rename after
everything in it was flushed to the disk. The previous one stays beside it.
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

VERSION = 1
MANIFEST = "manifest.json"


class DamagedError(ValueError):
    """A checkpoint that can't be used; the message names the file."""


class _Checked:
    """A file that counts and checksums what is written through it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.bytes = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        self.bytes += len(data)
        self.crc = zlib.crc32(data, self.crc)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_shard(folder: Path, rank: int, state: Any) -> dict[str, Any]:
    """Write and flush one rank's shard; its manifest entry (name, bytes, crc32)."""
    path = folder / f"rank-{rank:05}.pt"
    with path.open("wb") as file:
        checked = _Checked(file)
        torch.save(state, cast(Any, checked))
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "bytes": checked.bytes, "crc32": checked.crc}


def commit(folder: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, flush everything, and give the checkpoint its name."""
    body = {"format": "paceline-checkpoint", "version": VERSION, **manifest}
    body["check"] = _check(body)
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


def _check(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint. Every byte is read; DamagedError names what is wrong."""
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        check = body.pop("check")
        version = body["version"]
        foreign = body["format"] != "paceline-checkpoint"
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is not a checkpoint's manifest ({error})") from None
    if foreign:
        raise DamagedError(f"{path} is not Paceline's")
    if version > VERSION:
        raise DamagedError(f"{path} has version {version}, newer than this Paceline's ({VERSION})")
    if check != _check(body):
        raise DamagedError(f"{path} is damaged (its checksum does not fit)")
    for entry in body["files"]:
        _verify_shard(folder / entry["name"], entry)
    return cast(dict[str, Any], body)


def _verify_shard(path: Path, entry: dict[str, Any]) -> None:
    try:
        size, crc = 0, 0
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                size += len(block)
                crc = zlib.crc32(block, crc)
    except OSError as error:
        raise DamagedError(f"{path} can't be read ({error.strerror})") from None
    if size != entry["bytes"]:
        raise DamagedError(f"{path} has {size} bytes instead of {entry['bytes']}")
    if crc != entry["crc32"]:
        raise DamagedError(f"{path} is damaged (its checksum does not fit)")


def read_shard(folder: Path, name: str) -> Any:
    """A shard's content; nothing in it is run (weights_only)."""
    try:
        return torch.load(folder / name, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch makes of a file that isn't its own
        first = str(error).strip().splitlines()[:1]
        raise DamagedError(f"{folder / name} can't be loaded ({' '.join(first)})") from None


def found(directory: Path) -> list[Path]:
    """Checkpoints in ``directory``, the newest first; not yet verified."""
    if not directory.is_dir():
        return []
    names = [p for p in directory.iterdir() if p.name.startswith("step-") and p.is_dir()]
    return sorted(names, key=lambda path: path.name, reverse=True)


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
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"checkpoints can't be written to {directory}: {error.strerror}. "
            "HINT: another folder in world.epochs(..., checkpoint=...)"
        ) from None
