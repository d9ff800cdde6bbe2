"""Reading and verification of the manifest and the shards of a checkpoint.

A checkpoint is untrusted input: anyone may have written its folder, including the checksums. So
shards must have the names that Paceline gives, the format of torch.save, and the size in the
manifest. Reading a shard then takes no more memory than the size of its file.
"""

import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, TypedDict

import torch
from crc32c import crc32c
from msgspec import Meta

from ..record.ring.header_schema import MAX_RANKS
from ..security.files import InvalidFileError, error_reason, open_regular, read_regular
from ..security.schema import Count, check, load_json
from .pickle_stack import HANDLERS, GlobalName, Handler, PickleError, PickleStack, constant

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


# Check the pickle of a shard before torch loads it.
#
# The unpickler of ``torch.load(weights_only=True)`` does not execute arbitrary code. But a file
# of a few hundred bytes can make it use any amount of memory or time: ``bytearray(n)``,
# ``torch.FloatTensor(n)``, an encoding that doubles its input, tuples that contain the same tuple
# several times, at each level. ``check_pickle`` interprets the opcodes on placeholders. It allows
# only the objects that ``CheckpointSaver`` writes, with arguments that are bounded by the size of
# the file.

MAX_PICKLE_BYTES = 256 << 20
MAX_OPCODES = 10_000_000
MAX_TENSORS = 1_000_000
MAX_TUPLE_DEPTH = 200
MAX_KEY_PARTS = 10_000_000  # in all tuple keys, as hashing a tuple takes time for each part
MAX_EQUAL_HASHES = 64  # integers with the same hash; a dict of them takes quadratic time
MAX_SHORT_TEXT = 64  # characters; allowed functions take no longer strings as arguments
MAX_DIMENSIONS = 64

_STORAGES_OF_ITEM_BYTES = {
    1: ("Byte", "Char", "Bool", "QInt8", "QUInt8"),
    2: ("Short", "Half", "BFloat16"),
    4: ("Int", "Float", "QInt32"),
    8: ("Long", "Double", "ComplexFloat"),
    16: ("ComplexDouble",),
}
_STORAGES = {
    f"torch {name}Storage": size for size, of in _STORAGES_OF_ITEM_BYTES.items() for name in of
}
_STORAGES["torch.storage UntypedStorage"] = 1
_QSCHEMES = frozenset(
    f"torch per_{name}"
    for name in (
        *("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric"),
        "channel_affine_float_qparams",
    )
)


class _LongText:
    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class _Tuple:
    __slots__ = ("depth", "items", "parts")

    def __init__(self, items: list[Any]) -> None:
        self.items = tuple(items)
        inner = [item for item in items if isinstance(item, _Tuple)]
        self.depth: int = 1 + max((item.depth for item in inner), default=0)
        self.parts: int = 1 + len(items) + sum(item.parts for item in inner)
        if self.depth > MAX_TUPLE_DEPTH:
            raise PickleError(f"tuples of over {MAX_TUPLE_DEPTH} levels")


class _Storage:
    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count  # number of elements


_DICT, _ORDERED_DICT, _OTHER = object(), object(), object()


def check_pickle(data: bytes, records: Mapping[str, int], *, of_models: bool = False) -> None:
    """Check that a pickle contains only objects that ``CheckpointSaver`` writes.

    Args:
        data: Content of ``data.pkl``.
        records: Size in bytes of each tensor storage in the same archive, by its key.
        of_models: Also allow what the ``state_dict`` of an ``nn.Module`` contains: an OrderedDict
            with attributes, and parameters.

    Raises:
        PickleError: The pickle contains a disallowed opcode, global or argument, or exceeds a
            limit.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise PickleError(f"its data.pkl has {len(data):,} bytes, more than {MAX_PICKLE_BYTES:,}")
    _Machine(len(data), records, of_models).interpret(data, _HANDLERS, MAX_OPCODES)


class _Machine(PickleStack):
    """Stack and memo of an unpickler, with placeholders for the objects."""

    subject = "its data.pkl"

    def __init__(self, size: int, records: Mapping[str, int], of_models: bool) -> None:
        super().__init__()
        self.records, self.of_models = records, of_models
        self.bytes_left = size
        self.set_items_left = MAX_OPCODES
        self.key_parts_left = MAX_KEY_PARTS
        self.tensors_left = MAX_TENSORS
        self.large_keys: dict[int, set[int]] = {}

    def text(self, value: str) -> None:
        self.stack.append(value if len(value) <= MAX_SHORT_TEXT else _LongText(len(value)))

    def set_items(self, items: list[Any]) -> None:
        if self.stack[-1] not in (_DICT, _ORDERED_DICT) or len(items) % 2:
            raise PickleError("its data.pkl sets items of a value that is not a dict")
        for key in items[::2]:
            self.key(key)

    def key(self, key: Any) -> None:
        """Limit the time that hashing a dict key or a set item takes."""
        if isinstance(key, _Tuple):
            self.key_parts_left -= key.parts
            if self.key_parts_left < 0:
                raise PickleError(f"keys of over {MAX_KEY_PARTS:,} parts")
            for item in key.items:
                if isinstance(item, _Tuple):
                    self.key_parts_left += item.parts
                self.key(item)
        elif type(key) is int and key.bit_length() > 60:
            same = self.large_keys.setdefault(hash(key), set())
            same.add(key)
            if len(same) > MAX_EQUAL_HASHES:
                raise PickleError("keys that were made to have the same hash value")

    def push_global(self, name: str) -> None:
        module, _, attribute = name.partition(" ")
        dtype = module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype)
        if not dtype and name not in _STORAGES and name not in _QSCHEMES and name not in _FUNCTIONS:
            raise PickleError(f"its data.pkl names {'.'.join(name.split(' '))[:80]!r}")
        self.stack.append(GlobalName(name))

    def push_storage(self, _: Any) -> None:
        kind, storage, key, location, count = self.stack.pop().items
        item_bytes = _STORAGES[storage.name]
        if kind != "storage" or not isinstance(location, str) or type(count) is not int:
            raise PickleError("its data.pkl has a malformed storage")
        if self.records.get(key) != count * item_bytes:
            raise PickleError("a storage has another size than its record")
        self.stack.append(_Storage(count))

    def push_tuple(self, items: list[Any]) -> None:
        self.stack.append(_Tuple(items))

    def reduce(self, function: Any, arguments: Any) -> None:
        self.stack.append(_FUNCTIONS[function.name](self, *arguments.items))

    def encode(self, text: Any, encoding: Any) -> Any:
        length = text.length if isinstance(text, _LongText) else len(text)
        self.bytes_left -= length
        if not isinstance(text, str | _LongText) or encoding != "latin1" or self.bytes_left < 0:
            raise PickleError("its data.pkl encodes a text that is not that of bytes")
        return _OTHER

    def make_set(self, items: Any) -> Any:
        self.set_items_left -= len(items)
        if not isinstance(items, list) or self.set_items_left < 0:
            raise PickleError("its data.pkl has a malformed set")
        for item in items:
            self.key(item)
        return _OTHER

    def ordered_dict(self) -> Any:
        # otherwise hooks of a tensor, always empty
        return _ORDERED_DICT if self.of_models else _OTHER

    def build(self, state: Any) -> None:
        if self.stack[-1] is not _ORDERED_DICT or state is not _DICT:
            raise PickleError("its data.pkl has attributes of a value that is no OrderedDict")

    def empty_bytes(self) -> Any:
        return _OTHER

    def complex(self, real: float, imaginary: float) -> Any:
        if type(real) is not float or type(imaginary) is not float:
            raise PickleError("its data.pkl has a malformed complex number")
        return _OTHER

    def shape(self, sizes: Any) -> Any:
        _dimensions(sizes)
        return _OTHER

    def short_arguments(self, text: Any, number: Any = 0) -> Any:
        if not isinstance(text, str) or type(number) is not int:
            raise PickleError("its data.pkl has a malformed device or layout")
        return _OTHER

    def tensor(self, storage: Any, _offset: Any, size: Any, *_: Any) -> Any:
        if not isinstance(storage, _Storage) or math.prod(_dimensions(size)) > storage.count:
            raise PickleError("a tensor is larger than its storage")
        return self.tensor_of_tensors()

    def parameter(self, data: Any, requires_grad: Any, _hooks: Any) -> Any:
        if not self.of_models or data is not _OTHER or type(requires_grad) is not bool:
            raise PickleError("its data.pkl has a malformed parameter")
        return self.tensor_of_tensors()

    def tensor_of_tensors(self, *_: Any) -> Any:
        self.tensors_left -= 1
        if self.tensors_left < 0:
            raise PickleError(f"more than {MAX_TENSORS:,} tensors")
        return _OTHER


def _dimensions(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, _Tuple) or len(sizes.items) > MAX_DIMENSIONS:
        raise PickleError("its data.pkl has a malformed shape")
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes.items):
        raise PickleError("its data.pkl has a malformed shape")
    return sizes.items


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": _Machine.ordered_dict,
    "_codecs encode": _Machine.encode,
    "__builtin__ bytes": _Machine.empty_bytes,
    "__builtin__ set": _Machine.make_set,
    "__builtin__ complex": _Machine.complex,
    "torch Size": _Machine.shape,
    "torch device": _Machine.short_arguments,
    "torch.serialization _get_layout": _Machine.short_arguments,
    "torch._utils _rebuild_tensor_v2": _Machine.tensor,
    "torch._utils _rebuild_tensor_v3": _Machine.tensor,
    "torch._utils _rebuild_parameter": _Machine.parameter,
    "torch._utils _rebuild_qtensor": _Machine.tensor,
    "torch._utils _rebuild_sparse_tensor": _Machine.tensor_of_tensors,
    "torch._utils _rebuild_nested_tensor": _Machine.tensor_of_tensors,
}


_HANDLERS: dict[str, Handler] = {
    **HANDLERS,
    "STOP": lambda machine, _: machine.pop(1),
    "BINUNICODE": _Machine.text,
    "EMPTY_DICT": constant(_DICT),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "BINPERSID": _Machine.push_storage,
}


class DamagedCheckpointError(InvalidFileError):
    """A checkpoint that is corrupted or can't be read. The message names the file."""


@contextmanager
def name_damage(path: Path) -> Iterator[None]:
    """Raise DamagedCheckpointError, which names the file, for any error of reading it."""
    try:
        yield
    except DamagedCheckpointError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(path, f"can't be read ({error_reason(error)})") from None
    except Exception as error:  # torch may raise any exception for an invalid file
        first = str(error).strip().splitlines()[:1]
        raise DamagedCheckpointError(path, f"can't be loaded ({' '.join(first)})") from None


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
    with name_damage(path), open(open_regular(path, follow_links=False), "rb") as file:
        size, crc = os.fstat(file.fileno()).st_size, 0
        if size == entry["bytes"]:
            add, block = _CHECKSUMS["crc32c" in entry], memoryview(bytearray(BLOCK_BYTES))
            left = size
            while count := file.readinto(block[: min(BLOCK_BYTES, left)]):
                crc = add(block[:count], crc)
                left -= count
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
    with name_damage(path), open(open_regular(path, follow_links=False), "rb") as file:
        check_archive(file, os.fstat(file.fileno()).st_size, path)
        return map_archive(file)


def map_archive(file: BinaryIO) -> Any:
    """Return the content of a file that ``check_archive`` has accepted, mapped into memory.

    A rank reads only what it needs of the pieces of other ranks. The path is that of the checked
    descriptor, because torch maps no file objects.
    """
    # b"" is pickled as a call of bytes(); check_archive rejects calls with arguments.
    with torch.serialization.safe_globals([bytes]):
        same = f"/dev/fd/{file.fileno()}"
        return torch.load(same, map_location="cpu", weights_only=True, mmap=True)


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
        members = archive.infolist()
        (entry,) = [member for member in members if member.filename.endswith("/data.pkl")]
        # An opcode has at least one byte, so smaller pickles do not exceed the limit.
        if entry.file_size > MAX_OPCODES:
            pickled, records = _read(archive, entry), _records(members)
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
        member.filename.removeprefix(prefix): member.file_size
        for member in members
        if member.filename.startswith(prefix)
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
        stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if not stored or sum(member.file_size for member in members) > size:
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
    names = [member.orig_filename for member in members]
    prefix = names[0].partition("/")[0] if names else ""
    plain = all(MEMBER.fullmatch(name) and name.startswith(f"{prefix}/") for name in names)
    if not plain or len({name.lower() for name in names}) < len(names):
        raise PickleError("its members have names that torch.save does not write")
    if archive.comment or min((member.header_offset for member in members), default=1):
        raise PickleError("it is not an archive of torch.save")
    entry = next((member for member in members if member.filename == f"{prefix}/data.pkl"), None)
    if entry is None or entry.file_size > MAX_PICKLE_BYTES:
        raise PickleError(f"it has no data.pkl of at most {MAX_PICKLE_BYTES:,} bytes")
    return _read(archive, entry)


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return a member of an archive. Shards have no CRC-32; the manifest has their CRC-32C."""
    if entry.CRC == 0:
        del entry.CRC  # then zipfile does not compare it
    return archive.read(entry)
