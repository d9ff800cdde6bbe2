"""Weights in formats of others: safetensors, ``torch.save`` and torch.distributed.checkpoint.

A safetensors file is a JSON header, then the bytes of the tensors one after the other. The writer
of the library safetensors takes all tensors at once, in memory. This one takes them one by one, so
that a model larger than the memory can be written. The reader maps the file; it needs no package,
and its errors name the file. A file of ``torch.save`` is checked before ``torch.load`` maps it.

PyTorch's FileSystemReader loads the file ``.metadata`` of torch.distributed.checkpoint by
``pickle``, which may execute any code; ``read_records`` reads it. The files of the ranks contain an
archive of torch.save for each piece, checked like a shard of Paceline.
"""

import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..security.files import InvalidFileError, open_regular, read_regular
from ..security.folders import NewFile
from ..security.schema import load_json
from .manifest import DamagedCheckpointError, check_archive, map_archive, name_damage
from .pickle_stack import HANDLERS, GlobalName, Handler, PickleError, PickleStack
from .sharded_tensor import Index, Piece, PieceError, SavedTensor, is_index

MAX_HEADER_BYTES = 100_000_000  # that readers accept
MAX_PARSED_HEADER_BYTES = 512 << 20  # some 400,000 tensors
MAX_DEPTH = 100
MAX_PARTS = 10_000_000
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
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


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


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by their names, mapped into memory.

    Raises:
        DamagedCheckpointError: The file can't be read, or is not a valid safetensors file.
    """
    with name_damage(path), open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise DamagedCheckpointError(path, "is not a safetensors file")
        entries = _read_entries(file.read(length), path)
        # The path is that of the checked descriptor, because torch maps no file objects.
        content = torch.from_file(f"/dev/fd/{file.fileno()}", size=size, dtype=torch.uint8)
    places = {name: _extent_of(name, entry, path) for name, entry in entries.items()}
    end = 8 + length
    for place in sorted(places.values(), key=lambda place: (place.begin, place.end)):
        if 8 + length + place.begin < end:
            raise DamagedCheckpointError(path, "has two tensors in one place")
        end = 8 + length + place.end
    if end > size:
        raise DamagedCheckpointError(path, f"has only {size:,} of {end:,} bytes")
    return {name: _mapped(content, 8 + length, place) for name, place in places.items()}


def _read_entries(head: bytes, path: Path) -> dict[str, object]:
    try:
        header = load_json(head, path, MAX_PARSED_HEADER_BYTES)
    except InvalidFileError as error:
        raise DamagedCheckpointError(path, f"has a header that {error.reason}") from None
    if not isinstance(header, dict):
        raise DamagedCheckpointError(path, "has a header that lists no tensors")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


class _Extent(NamedTuple):
    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _extent_of(name: str, entry: object, path: Path) -> _Extent:
    given = entry if isinstance(entry, dict) else {}
    dtype = given.get("dtype")
    shape, offsets = _numbers(given.get("shape")), _numbers(given.get("data_offsets"))
    if shape is None or offsets is None:
        raise DamagedCheckpointError(path, f"has no shape or place of {name[:80]!r}")
    if not isinstance(dtype, str) or dtype not in _TORCH_DTYPES:
        raise DamagedCheckpointError(path, f"has a dtype of {name[:80]!r} that PyTorch lacks")
    found = _TORCH_DTYPES[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * found.itemsize:
        raise DamagedCheckpointError(path, f"has another size than shape of {name[:80]!r}")
    return _Extent(offsets[0], offsets[1], shape, found)


def _numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        return None
    return tuple(value)


def _mapped(content: torch.Tensor, start: int, place: _Extent) -> torch.Tensor:
    part = content[start + place.begin : start + place.end]
    if part.storage_offset() % place.dtype.itemsize:  # such a file is allowed, though rare
        part = part.clone()
    return part.view(place.dtype).view(place.shape)


def load_torch_file(path: Path) -> dict[str, Any]:
    """Return the values of a file by their names; names in nested containers are joined by dots.

    Tensors are mapped, not read. Those that share memory (tied weights) are one object.

    Raises:
        DamagedCheckpointError: The file can't be read, or contains other objects than tensors,
            numbers, texts and containers.
    """
    with name_damage(path), open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            check_archive(file, size, path, of_models=True)
        except DamagedCheckpointError as error:
            hint = "HINT: torch.save(model.state_dict(), FILE) writes a file that can be converted"
            raise DamagedCheckpointError(path, f"{error.reason}. {hint}") from None
        content = map_archive(file)
    if isinstance(content, torch.Tensor):
        content = {"tensor": content}
    found: dict[str, Any] = {}
    for count, (name, value) in enumerate(_named(content, "", 0, path), 1):
        if count > MAX_PARTS:
            raise DamagedCheckpointError(path, f"has over {MAX_PARTS:,} values")
        if name in found:
            raise DamagedCheckpointError(path, f"has two values of the name {name[:80]!r}")
        found[name] = value
    return _shared(found, size, path)


def _named(value: Any, name: str, depth: int, path: Path) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise DamagedCheckpointError(path, f"nests over {MAX_DEPTH} levels")
    if isinstance(value, dict | list | tuple) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _named(item, f"{name}.{key}" if name else str(key), depth + 1, path)
    else:
        yield name, value


def _shared(values: dict[str, Any], size: int, path: Path) -> dict[str, Any]:
    """Return the values with one object for tensors that are the same part of the same storage."""
    first: dict[tuple[Any, ...], torch.Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in values.items():
        strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if strided and not value.is_nested:
            tensor = value.detach()
            where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            found[name] = first.setdefault(where, tensor)
        else:
            found[name] = value
    if sum(tensor.numel() * tensor.element_size() for tensor in first.values()) > size:
        reason = "has tensors that overlap in memory. HINT: save clones of them"
        raise DamagedCheckpointError(path, reason)
    return found


METADATA = ".metadata"
MAX_METADATA_BYTES = 256 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


# The file ``.metadata`` of torch.distributed.checkpoint: a pickle, read without an unpickler.
#
# Even an unpickler that knows no functions lets a file of a few bytes use any amount of memory or
# time: a large number in its memo, a length before the bytes, keys of tuples of tuples. So the
# opcodes that PyTorch writes are interpreted here, and others are errors. Objects become records
# of their fields.

MAX_OPCODES = 50_000_000
MAX_OBJECTS = 10_000_000  # some ten for each piece of a tensor
_MODULE = "torch.distributed.checkpoint"
_RECORDS = {
    *(
        f"{_MODULE}.metadata {name}"
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
            *("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        )
    ),
    f"{_MODULE}.filesystem _StorageInfo",
}
_IGNORED = {
    *(f"{_MODULE}.metadata _MEM_FORMAT_ENCODING", "torch.serialization _get_layout"),
    *("pathlib PosixPath", "pathlib WindowsPath", "pathlib._local PosixPath"),
}
_SIZE = "torch Size"


class Record:
    """The fields of an object. Records are compared by identity, as their fields come later."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None

    def get(self, name: str) -> Any:
        """Return a field; None if there is none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_records(data: bytes) -> Record:
    """Return the object in the content of a ``.metadata`` file.

    Raises:
        PickleError: PyTorch does not write such a file, or it exceeds a limit.
    """
    machine = _Machine()
    machine.interpret(data, _HANDLERS, MAX_OPCODES)
    if len(machine.stack) != 1 or not isinstance(machine.stack[0], Record):
        raise PickleError("it is no record")
    record: Record = machine.stack[0]
    return record


class _Machine(PickleStack):
    """Stack and memo of an unpickler, with records for the objects."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = 0

    def push_object(self, value: Any) -> None:
        self.objects += 1
        if self.objects > MAX_OBJECTS:
            raise PickleError(f"it has more than {MAX_OBJECTS:,} objects")
        self.stack.append(value)

    def push_tuple(self, items: list[Any]) -> None:
        self.push_object(tuple(items))

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def push_global(self, name: str) -> None:
        module, _, attribute = name.partition(" ")
        dtype = getattr(torch, attribute, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            self.push(dtype)
        elif name in _RECORDS or name in _IGNORED or name == _SIZE:
            self.push(GlobalName(name))
        else:
            raise PickleError(f"it names {name[:80]!r}")

    def stack_global(self, _: Any) -> None:
        module, attribute = self.pop(2)
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise PickleError("it is malformed")
        self.push_global(f"{module} {attribute}")

    def new_object(self, _: Any) -> None:
        kind, arguments = self.pop(2)
        if kind.name not in _RECORDS or arguments != ():
            raise PickleError(f"it makes an object of {kind.name[:80]!r}")
        self.push_object(Record())

    def reduce(self, function: Any, arguments: Any) -> None:
        if function.name == _SIZE:
            (sizes,) = arguments
            self.push(sizes)
        elif function.name in _IGNORED:
            self.push(None)
        else:
            raise PickleError(f"it calls {function.name[:80]!r}")

    def build(self, state: Any) -> None:
        if not isinstance(self.stack[-1], Record) or not isinstance(state, dict | tuple):
            raise PickleError("it has fields of a value that is no record")
        self.stack[-1].state = state

    def set_items(self, items: list[Any]) -> None:
        own = self.stack[-1]
        if not isinstance(own, dict) or len(items) % 2:
            raise PickleError("it sets items of a value that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | Record):  # others may take long to hash
                raise PickleError(f"it has a key of type {type(key).__name__}")
            own[key] = value


_HANDLERS: dict[str, Handler] = {
    **HANDLERS,
    **dict.fromkeys(("FRAME", "STOP"), lambda _machine, _argument: None),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), _Machine.push),
    "EMPTY_DICT": lambda machine, _: machine.push_object({}),
    "EMPTY_LIST": lambda machine, _: machine.push_object([]),
    "MEMOIZE": _Machine.memoize,
    "STACK_GLOBAL": _Machine.stack_global,
    "NEWOBJ": _Machine.new_object,
}


def is_dcp_folder(folder: Path) -> bool:
    """Return whether torch.distributed.checkpoint has written this folder."""
    return os.path.lexists(folder / METADATA)


def load_dcp(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors of a folder by their names, read into memory. No code is executed.

    Raises:
        DamagedCheckpointError: A file is missing or invalid; the error names the file.
    """
    path = folder / METADATA
    tensors, storage = _read_metadata(path)
    places = [_place(info, path) for info in storage.values()]
    _check_disjoint(places, path)
    pieces: dict[str, list[Piece]] = {}
    for (index, info), place in zip(storage.items(), places, strict=True):
        name, at = index.get("fqn"), index.get("offset")
        if not isinstance(name, str) or name not in tensors:
            continue
        tensor = _read_piece(folder, place)
        offset = at if at is not None else (0,) * tensor.dim()
        if info.get("transform_descriptors") or not is_index(offset):
            raise DamagedCheckpointError(path, f"has a compressed or invalid piece of {name}")
        piece: Piece = {"shape": tensors[name], "offset": offset, "tensor": tensor}
        pieces.setdefault(name, []).append(piece)
    if absent := [name for name in tensors if name not in pieces]:
        raise DamagedCheckpointError(path, f"has no pieces of {absent[0]}")
    try:
        return {name: SavedTensor.of(pieces[name]) for name in tensors}
    except PieceError as error:
        raise DamagedCheckpointError(path, str(error)) from None


def _read_metadata(path: Path) -> tuple[dict[str, Index], dict[Record, Record]]:
    """Return the shape of each tensor, and where each piece is stored."""
    with name_damage(path):
        try:
            root = read_records(read_regular(path, MAX_METADATA_BYTES, follow_links=False))
            entries, storage = root.get("state_dict_metadata"), root.get("storage_data")
            if not isinstance(entries, dict) or not isinstance(storage, dict):
                raise PickleError("it does not list tensors and their files")
            records = (*entries.values(), *storage, *storage.values())
            if not all(isinstance(record, Record) for record in records):
                raise PickleError("an entry or the index of a piece is no record")
            sizes = {name: entry.get("size") for name, entry in entries.items()}
            shapes = {name: size for name, size in sizes.items() if size is not None}
            if not all(isinstance(name, str) and is_index(size) for name, size in shapes.items()):
                raise PickleError("a tensor has an invalid name or size")
            return shapes, storage
        except PickleError as error:
            reason = f"is not the metadata of torch.distributed.checkpoint ({error})"
            raise DamagedCheckpointError(path, reason) from None


class Place(NamedTuple):
    """Where a piece is stored."""

    file: str
    offset: int
    length: int


def _place(info: Record, path: Path) -> Place:
    name, offset, length = (info.get(field) for field in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name.startswith(".."):
        raise DamagedCheckpointError(path, f"names the file {name!r:.80}")
    if not is_index((offset, length)):
        raise DamagedCheckpointError(path, f"has an invalid position in {name}")
    return Place(name, offset, length)


def _check_disjoint(places: list[Place], path: Path) -> None:
    """Check that no part of a file is read twice, so that memory is bounded by the files' sizes."""
    ordered = sorted(places)
    for place, following in itertools.pairwise(ordered):
        overlaps = following.offset < place.offset + place.length or place == following
        if place.file == following.file and overlaps:
            raise DamagedCheckpointError(path, f"has two pieces in one place of {place.file}")


def _read_piece(folder: Path, place: Place) -> torch.Tensor:
    """Return the tensor in a part of a rank's file."""
    path = folder / place.file
    with name_damage(path), open(open_regular(path, follow_links=False), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if place.offset + place.length > size:
            raise DamagedCheckpointError(path, f"has only {size:,} bytes")
        file.seek(place.offset)
        part = io.BytesIO(file.read(place.length))
        check_archive(part, place.length, path)
        tensor = torch.load(part, map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise DamagedCheckpointError(path, "contains a piece that is no dense tensor")
    return tensor.detach()
