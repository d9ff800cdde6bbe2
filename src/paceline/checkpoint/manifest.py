"""The manifest of a checkpoint, and the shards that it names.

A checkpoint's folder may have been written by anyone, its checksums included. Names of shards must
be those that Paceline gives, and a shard must be a file that torch.save writes, as large as the
manifest says: reading it then takes no more memory than the file has bytes.
"""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, TypedDict

import torch
from msgspec import Meta

from ..record.about import MAX_RANKS
from ..security.files import InvalidFileError, open_regular, read_regular
from ..security.reason import reason_of
from ..security.schema import Count, check

VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20  # some 100 bytes a rank
BLOCK_BYTES = 1 << 22

ShardName = Annotated[str, Meta(pattern=r"^rank-[0-9]{5,7}\.pt$")]


class DamagedError(InvalidFileError):
    """A checkpoint that can't be used; the message names the file."""


class ShardEntry(TypedDict):
    """One rank's shard."""

    name: ShardName
    bytes: Count
    crc32: Annotated[int, Meta(ge=0, lt=1 << 32)]


class Manifest(TypedDict):
    """What a manifest says."""

    format: Literal["paceline-checkpoint"]
    version: Literal[1]
    step: NotRequired[Count]
    epoch: NotRequired[Count]
    inside: NotRequired[bool]
    ranks: NotRequired[Annotated[int, Meta(ge=1, le=MAX_RANKS)]]
    files: Annotated[list[ShardEntry], Meta(min_length=1, max_length=MAX_RANKS)]


def checksum(body: dict[str, Any]) -> int:
    """Return the checksum of a manifest without its ``check``."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """Return the checked manifest of a checkpoint. No shard is opened.

    Raises:
        DamagedError: It is missing, damaged, newer, or names other files than shards.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(read_regular(path, MAX_MANIFEST_BYTES, follow_links=False))
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except RecursionError:
        raise DamagedError(path, "is not a checkpoint's manifest") from None
    except (OSError, ValueError) as error:
        reason = f"is not a checkpoint's manifest ({reason_of(error)})"
        raise DamagedError(path, reason) from None
    if not isinstance(body, dict) or body.get("format") != "paceline-checkpoint":
        raise DamagedError(path, "is not a manifest of Paceline")
    version, expected = body.get("version"), body.pop("check", None)
    if isinstance(version, int) and version > VERSION:
        reason = f"has version {str(version)[:20]}, newer than this Paceline's ({VERSION})"
        raise DamagedError(path, reason)
    if expected != checksum(body):
        raise DamagedError(path, "is damaged (its checksum does not fit)")
    try:
        manifest = check(body, Manifest, path)
    except InvalidFileError as error:
        raise DamagedError(path, error.reason) from None
    if len({entry["name"] for entry in manifest["files"]}) < len(manifest["files"]):
        raise DamagedError(path, "names a shard twice")
    return manifest


def verify_shard(folder: Path, entry: ShardEntry) -> None:
    """Read every byte of a shard. Raises DamagedError where it is not what the manifest says."""
    path = folder / entry["name"]
    try:
        with open(open_regular(path, follow_links=False), "rb") as file:
            size, crc = os.fstat(file.fileno()).st_size, 0
            if size == entry["bytes"]:
                left = size
                while block := file.read(min(BLOCK_BYTES, left)):
                    crc = zlib.crc32(block, crc)
                    left -= len(block)
    except OSError as error:
        raise DamagedError(path, f"can't be read ({reason_of(error)})") from None
    if size != entry["bytes"]:
        raise DamagedError(path, f"has {size} bytes instead of {entry['bytes']}")
    if crc != entry["crc32"]:
        raise DamagedError(path, "is damaged (its checksum does not fit)")


def read_shard(folder: Path, name: str) -> Any:
    """Return a shard's content; nothing in it is run (weights_only)."""
    path = folder / name
    try:
        with open(open_regular(path, follow_links=False), "rb") as file:
            _check_archive(file, path)
            return torch.load(file, map_location="cpu", weights_only=True)
    except DamagedError:
        raise
    except Exception as error:  # whatever torch makes of a file that isn't its own
        first = str(error).strip().splitlines()[:1]
        raise DamagedError(path, f"can't be loaded ({' '.join(first)})") from None


def _check_archive(file: BinaryIO, path: Path) -> None:
    """Raise DamagedError where a shard would unpack to more than its bytes."""
    size = os.fstat(file.fileno()).st_size
    try:
        members = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise DamagedError(path, f"can't be loaded ({error})") from None
    stored = all(one.compress_type == zipfile.ZIP_STORED for one in members)
    if not stored or sum(one.file_size for one in members) > size:
        raise DamagedError(path, "can't be loaded (its parts are compressed, or larger than it)")
    file.seek(0)
