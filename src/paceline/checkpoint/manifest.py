"""Reading and verification of the manifest and the shards of a checkpoint.

A checkpoint is untrusted input: anyone may have written its folder, including the checksums. So
shards must have the names that Paceline gives, the format of torch.save, and the size in the
manifest. Reading a shard then takes no more memory than the size of its file.
"""

import json
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, TypedDict

import torch
from crc32c import crc32c
from msgspec import Meta

from ..record.ring.header_schema import MAX_RANKS
from ..security.error_reason import error_reason
from ..security.files import InvalidFileError, open_regular, read_regular
from ..security.schema import Count, check, load_json
from .pickle_check import MAX_OPCODES, MAX_PICKLE_BYTES, check_pickle
from .pickle_stack import PickleError

# 2: pieces of DTensors, and the identity of the save in each shard; 3: archives without CRC-32
VERSION = 3
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 48 << 20  # about 100 bytes per rank
MAX_PARSED_MANIFEST_BYTES = 512 << 20
BLOCK_BYTES = 1 << 20  # stays in the cache of a core
_CHECKSUMS = {False: zlib.crc32, True: crc32c}  # the second one has an instruction of the processor
ARCHIVE_START = b"PK\x03\x04"
MEMBER = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)+")  # member names in a torch archive

ShardName = Annotated[str, Meta(pattern=r"^rank-[0-9]{5,7}\.pt$")]

Checksum = Annotated[int, Meta(ge=0, lt=1 << 32)]


class DamagedCheckpointError(InvalidFileError):
    """A checkpoint that is corrupted or can't be read. The message names the file."""


class ShardEntry(TypedDict):
    """Manifest entry of the shard of one rank."""

    name: ShardName
    bytes: Count
    crc32: NotRequired[Checksum]  # of version 1
    crc32c: NotRequired[Checksum]
    id: NotRequired[Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]]  # random, also in the shard


class Manifest(TypedDict):
    """Content of a manifest, without its checksum."""

    format: Literal["paceline-checkpoint"]
    version: Literal[1, 2, 3]
    step: NotRequired[Count]
    epoch: NotRequired[Count]
    inside: NotRequired[bool]
    ranks: NotRequired[Annotated[int, Meta(ge=1, le=MAX_RANKS)]]
    files: Annotated[list[ShardEntry], Meta(min_length=1, max_length=MAX_RANKS)]


def checksum(body: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest without its ``check`` field."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def read_manifest(folder: Path, dir_fd: int | None = None) -> Manifest:
    """Return the validated manifest of a checkpoint, without opening shards.

    Args:
        folder: Folder of the checkpoint.
        dir_fd: Its descriptor, if it is open.

    Raises:
        DamagedCheckpointError: The manifest is missing, corrupted, of a newer version, or names
            files other than shards.
    """
    path = folder / MANIFEST
    try:
        name = path if dir_fd is None else MANIFEST
        data = read_regular(name, MAX_MANIFEST_BYTES, dir_fd=dir_fd, follow_links=False)
        body = load_json(data, path, MAX_PARSED_MANIFEST_BYTES)
    except FileNotFoundError:
        raise DamagedCheckpointError(path, "is missing") from None
    except InvalidFileError as error:
        reason = f"is not a checkpoint's manifest (it {error.reason})"
        raise DamagedCheckpointError(path, reason) from None
    except OSError as error:
        reason = f"is not a checkpoint's manifest ({error_reason(error)})"
        raise DamagedCheckpointError(path, reason) from None
    if not isinstance(body, dict) or body.get("format") != "paceline-checkpoint":
        raise DamagedCheckpointError(path, "is not a manifest of Paceline")
    version, expected = body.get("version"), body.pop("check", None)
    if isinstance(version, int) and version > VERSION:
        reason = f"has version {str(version)[:20]}, newer than this Paceline's ({VERSION})"
        raise DamagedCheckpointError(path, reason)
    if expected != checksum(body):
        raise DamagedCheckpointError(path, "is damaged (its checksum does not match)")
    try:
        manifest = check(body, Manifest, path)
    except InvalidFileError as error:
        raise DamagedCheckpointError(path, error.reason) from None
    if len({entry["name"] for entry in manifest["files"]}) < len(manifest["files"]):
        raise DamagedCheckpointError(path, "names a shard twice")
    return manifest


def verify_shard(folder: Path, entry: ShardEntry) -> None:
    """Verify the size and the checksum of a shard by reading every byte.

    Raises:
        DamagedCheckpointError: The shard can't be read, or does not match the manifest.
    """
    path = folder / entry["name"]
    try:
        with open(open_regular(path, follow_links=False), "rb") as file:
            size, crc = os.fstat(file.fileno()).st_size, 0
            if size == entry["bytes"]:
                add, block = _CHECKSUMS["crc32c" in entry], memoryview(bytearray(BLOCK_BYTES))
                left = size
                while count := file.readinto(block[: min(BLOCK_BYTES, left)]):
                    crc = add(block[:count], crc)
                    left -= count
    except OSError as error:
        raise DamagedCheckpointError(path, f"can't be read ({error_reason(error)})") from None
    if size != entry["bytes"]:
        raise DamagedCheckpointError(path, f"has {size} bytes instead of {entry['bytes']}")
    if crc != entry.get("crc32c", entry.get("crc32")):
        raise DamagedCheckpointError(path, "is damaged (its checksum does not match)")


def read_shard(folder: Path, name: str) -> Any:
    """Return the content of a shard, mapped into memory. No code in it is executed (weights_only).

    Raises:
        DamagedCheckpointError: The shard can't be read, or is not a file that Paceline writes.
    """
    path = folder / name
    try:
        with open(open_regular(path, follow_links=False), "rb") as file:
            check_archive(file, os.fstat(file.fileno()).st_size, path)
            # b"" is pickled as a call of bytes(); the check above rejects calls with arguments.
            with torch.serialization.safe_globals([bytes]):
                # Mapped: a rank reads only what it needs of the pieces of other ranks. The path is
                # that of the checked descriptor, because torch maps no file objects.
                same = f"/dev/fd/{file.fileno()}"
                return torch.load(same, map_location="cpu", weights_only=True, mmap=True)
    except DamagedCheckpointError:
        raise
    except Exception as error:  # torch may raise any exception for an invalid file
        first = str(error).strip().splitlines()[:1]
        raise DamagedCheckpointError(path, f"can't be loaded ({' '.join(first)})") from None


def check_readable(path: Path, folder_fd: int) -> None:
    """Check that a newly written shard does not exceed the limits of ``read_shard``.

    Args:
        path: Path of the shard, for its name.
        folder_fd: Descriptor of the folder that contains the shard.

    Raises:
        ValueError: The values other than tensors are too large.
        OSError: The shard can't be read.
    """
    fd = open_regular(path.name, dir_fd=folder_fd, follow_links=False)
    with open(fd, "rb") as file, zipfile.ZipFile(file) as archive:
        (entry,) = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
        # An opcode has at least one byte, so smaller pickles do not exceed the limit.
        if entry.file_size > MAX_OPCODES:
            pickled, records = _read(archive, entry), _records(archive.infolist())
            try:
                check_pickle(pickled, records)
            except PickleError as error:
                raise ValueError(
                    f"torch could not load the state again: {error}. "
                    "HINT: store large lists of numbers as tensors or arrays"
                ) from None


def _records(members: list[zipfile.ZipInfo]) -> dict[str, int]:
    """Return the size in bytes of each tensor storage in an archive, by its key."""
    prefix = f"{members[0].filename.partition('/')[0]}/data/"
    return {
        one.filename.removeprefix(prefix): one.file_size
        for one in members
        if one.filename.startswith(prefix)
    }


def check_archive(file: BinaryIO, size: int, path: Path, *, of_models: bool = False) -> None:
    """Check a torch.save archive of ``size`` bytes before torch reads it.

    Args:
        of_models: Whether it may be the state of an ``nn.Module``, as ``check_pickle`` has it.

    Raises:
        DamagedCheckpointError: Reading the archive would take more memory than its size, or
            ``torch.save`` does not write such archives.
    """
    # Without this prefix torch reads the file as a plain pickle, even if an archive follows.
    if file.read(len(ARCHIVE_START)) != ARCHIVE_START:
        raise DamagedCheckpointError(path, "can't be loaded (it is not an archive)")
    try:
        archive = zipfile.ZipFile(file)
        members = archive.infolist()
        stored = all(one.compress_type == zipfile.ZIP_STORED for one in members)
        if not stored or sum(one.file_size for one in members) > size:
            reason = "can't be loaded (its members are compressed, or larger than the file)"
            raise DamagedCheckpointError(path, reason)
        pickled = _pickle_of(archive, members)
        check_pickle(pickled, _records(members), of_models=of_models)
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        if isinstance(error, DamagedCheckpointError):
            raise
        raise DamagedCheckpointError(path, f"can't be loaded ({error})") from None
    file.seek(0)


def _pickle_of(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo]) -> bytes:
    """Return data.pkl of an archive, if torch and zipfile read the archive in the same way.

    Raises:
        PickleError: torch may find other members than zipfile does, or data.pkl is too large.
    """
    names = [one.orig_filename for one in members]
    prefix = names[0].partition("/")[0] if names else ""
    plain = all(MEMBER.fullmatch(name) and name.startswith(f"{prefix}/") for name in names)
    if not plain or len({name.lower() for name in names}) < len(names):
        raise PickleError("its members have names that torch.save does not write")
    if archive.comment or min((one.header_offset for one in members), default=1):
        raise PickleError("it is not an archive of torch.save")
    entry = next((one for one in members if one.filename == f"{prefix}/data.pkl"), None)
    if entry is None or entry.file_size > MAX_PICKLE_BYTES:
        raise PickleError(f"it has no data.pkl of at most {MAX_PICKLE_BYTES:,} bytes")
    return _read(archive, entry)


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return a member of an archive. Shards have no CRC-32; the manifest has their CRC-32C."""
    if entry.CRC == 0:
        del entry.CRC  # then zipfile does not compare it
    return archive.read(entry)
