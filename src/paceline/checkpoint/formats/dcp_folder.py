"""Reading folders of torch.distributed.checkpoint without executing code.

PyTorch's FileSystemReader loads the file ``.metadata`` by ``pickle``, which may execute any code;
``dcp_metadata`` reads it. The files of the ranks contain an archive of torch.save for each piece,
checked like a shard of Paceline.
"""

import io
import itertools
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...security.error_reason import error_reason
from ...security.files import open_regular, read_regular
from ..manifest import DamagedCheckpointError, check_archive
from ..pickle_stack import PickleError
from ..sharded_tensor import Index, Piece, PieceError, SavedTensor
from .dcp_metadata import Record, read_records

METADATA = ".metadata"
MAX_METADATA_BYTES = 256 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


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
        if info.get("transform_descriptors") or not _is_index(offset):
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
    try:
        root = read_records(read_regular(path, MAX_METADATA_BYTES, follow_links=False))
        entries, storage = root.get("state_dict_metadata"), root.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise PickleError("it does not list tensors and their files")
        if not all(isinstance(one, Record) for one in (*entries.values(), *storage.values())):
            raise PickleError("an entry is no record")
        if not all(isinstance(one, Record) for one in storage):
            raise PickleError("the index of a piece is no record")
        sizes = {name: entry.get("size") for name, entry in entries.items()}
        found = {name: size for name, size in sizes.items() if size is not None}
        if not all(isinstance(name, str) and _is_index(size) for name, size in found.items()):
            raise PickleError("a tensor has an invalid name or size")
        return found, storage
    except OSError as error:
        raise DamagedCheckpointError(path, f"can't be read ({error_reason(error)})") from None
    except PickleError as error:
        reason = f"is not the metadata of torch.distributed.checkpoint ({error})"
        raise DamagedCheckpointError(path, reason) from None


class Place(NamedTuple):
    """Where a piece is stored."""

    file: str
    offset: int
    length: int


def _place(info: Record, path: Path) -> Place:
    name, offset, length = (info.get(one) for one in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name.startswith(".."):
        raise DamagedCheckpointError(path, f"names the file {name!r:.80}")
    if not _is_index((offset, length)):
        raise DamagedCheckpointError(path, f"has an invalid position in {name}")
    return Place(name, offset, length)


def _check_disjoint(places: list[Place], path: Path) -> None:
    """Check that no part of a file is read twice, so that memory is bounded by the files' sizes."""
    ordered = sorted(places)
    for place, following in itertools.pairwise(ordered):
        overlaps = following.offset < place.offset + place.length or place == following
        if place.file == following.file and overlaps:
            raise DamagedCheckpointError(path, f"has two pieces in one place of {place.file}")


def _is_index(value: Any) -> bool:
    return type(value) is tuple and all(type(one) is int and one >= 0 for one in value)


def _read_piece(folder: Path, place: Place) -> torch.Tensor:
    """Return the tensor in a part of a rank's file."""
    path = folder / place.file
    try:
        with open(open_regular(path, follow_links=False), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if place.offset + place.length > size:
                raise DamagedCheckpointError(path, f"has only {size:,} bytes")
            file.seek(place.offset)
            part = io.BytesIO(file.read(place.length))
        check_archive(part, place.length, path)
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
