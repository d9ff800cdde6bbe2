"""Reading folders of torch.distributed.checkpoint without executing code.

PyTorch's FileSystemReader loads the file ``.metadata`` by ``pickle``, which may execute any code.
Here an unpickler knows only the classes that PyTorch writes, as records without methods. The files
of the ranks contain an archive of torch.save for each piece, checked like a shard of Paceline.
"""

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from ...security.error_reason import error_reason
from ...security.files import open_regular, read_regular
from ..manifest import DamagedCheckpointError, check_archive
from ..sharded_tensor import Index, Piece, PieceError, SavedTensor

METADATA = ".metadata"
MAX_METADATA_BYTES = 256 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
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


class _Record:
    """Fields of an object in the metadata."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:  # keys of a dict get their state later
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


def _ignored(*_: Any) -> None:
    return None


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module} {name}"
        if full in _RECORDS:
            return _Record
        if full in _IGNORED:
            return _ignored
        if full == "torch Size":
            return tuple
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {full[:80]!r}")


def is_dcp_folder(folder: Path) -> bool:
    """Return whether torch.distributed.checkpoint has written this folder."""
    return os.path.lexists(folder / METADATA)


def load_dcp(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors of a folder by their names, read into memory. No code is executed.

    Raises:
        DamagedCheckpointError: A file is missing or invalid; the error names the file.
    """
    tensors, storage = _read_metadata(folder / METADATA)
    pieces: dict[str, list[Piece]] = {}
    for index, info in storage.items():
        name, at = index.get("fqn"), index.get("offset")
        if name not in tensors:
            continue
        where = info.get("relative_path"), info.get("offset"), info.get("length")
        tensor = _read_piece(folder, where)
        offset = at if at is not None else (0,) * tensor.dim()
        piece: Piece = {"shape": tensors[name], "offset": offset, "tensor": tensor}
        if info.get("transform_descriptors") or not _is_index(offset):
            reason = f"has a compressed or invalid piece of {name}"
            raise DamagedCheckpointError(folder / METADATA, reason)
        pieces.setdefault(name, []).append(piece)
    if absent := [name for name in tensors if name not in pieces]:
        raise DamagedCheckpointError(folder / METADATA, f"has no pieces of {absent[0]}")
    try:
        return {name: SavedTensor.of(pieces[name]) for name in tensors}
    except PieceError as error:
        raise DamagedCheckpointError(folder / METADATA, str(error)) from None


def _read_metadata(path: Path) -> tuple[dict[str, Index], dict[_Record, _Record]]:
    """Return the shape of each tensor, and where each piece is stored."""
    try:
        data = read_regular(path, MAX_METADATA_BYTES, follow_links=False)
        root = _MetadataUnpickler(io.BytesIO(data)).load()
        entries, storage = root.get("state_dict_metadata"), root.get("storage_data")
        assert all(isinstance(one, _Record) for one in (*storage.keys(), *storage.values()))
        found = {
            name: entry.get("size")
            for name, entry in entries.items()
            if isinstance(name, str) and entry.get("size") is not None
        }
        assert all(_is_index(shape) for shape in found.values())
        return found, storage
    except OSError as error:
        raise DamagedCheckpointError(path, f"can't be read ({error_reason(error)})") from None
    except Exception as error:  # pickle may raise any exception for an invalid file
        reason = f"is not the metadata of torch.distributed.checkpoint ({error})"
        raise DamagedCheckpointError(path, reason) from None


def _is_index(value: Any) -> bool:
    return type(value) is tuple and all(type(one) is int and one >= 0 for one in value)


def _read_piece(folder: Path, where: tuple[Any, Any, Any]) -> torch.Tensor:
    """Return the tensor in a part of a rank's file: ``where`` is file name, offset and length."""
    name, offset, length = where
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name.startswith(".."):
        raise DamagedCheckpointError(folder / METADATA, f"names the file {name!r:.80}")
    path = folder / name
    try:
        with open(open_regular(path, follow_links=False), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not _is_index((offset, length)) or offset + length > size:
                raise DamagedCheckpointError(path, f"has only {size:,} bytes")
            file.seek(offset)
            part = io.BytesIO(file.read(length))
        check_archive(part, length, path)
        tensor = torch.load(part, map_location="cpu", weights_only=True)
    except DamagedCheckpointError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(path, f"can't be read ({error_reason(error)})") from None
    except Exception as error:  # torch may raise any exception for an invalid file
        first = str(error).strip().splitlines()[:1]
        raise DamagedCheckpointError(path, f"can't be loaded ({' '.join(first)})") from None
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise DamagedCheckpointError(path, "contains a piece that is no dense tensor")
    return tensor.detach()
