"""Python objects between ranks: as data where possible, else as pickles between ranks of the job.

An object of numbers, strings, tensors, arrays and containers travels as an archive that is checked
like a shard of a checkpoint before it is loaded. Any other object is pickled. Unpickling can run
code, so ranks accept pickles only where they have proved that they belong to the job
(``comm/members/membership``).
"""

import io
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ....checkpoint import state_tree
from ....checkpoint.manifest import DamagedCheckpointError, check_archive
from ....comm.members.membership import is_store_private

DATA, PICKLE, UNSENDABLE = 0, 1, 2  # kinds of an encoded object
MAX_OBJECT_BYTES = (1 << 31) - 1  # of one rank, as in Horovod
_SCALARS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size)


def encode(value: Any) -> tuple[int, bytes]:
    """Return the kind of an object, and its bytes; for UNSENDABLE the reason.

    It does not raise, so that all ranks learn of the mistake.
    """
    try:
        data, kind = _as_data(value), DATA
        if data is None:
            data, kind = _pickled(value), PICKLE
    except Exception as error:  # of functions of the object, too
        first = " ".join(str(error).strip().splitlines()[:1])
        return UNSENDABLE, f"{_of_type(value)} can't be pickled ({first})".encode()
    if len(data) > MAX_OBJECT_BYTES:
        return UNSENDABLE, f"{_of_type(value)} has {len(data):,} bytes".encode()
    if kind == PICKLE and not is_store_private():
        reason = (
            f"{_of_type(value)} would be pickled, and the ranks have not proved that they belong "
            "to the job. HINT: start the job with paceline run, or send numbers, strings, tensors "
            "and containers of them"
        )
        return UNSENDABLE, reason.encode()
    return kind, data


def decode(kind: int, data: bytes, name: str) -> Any:
    """Return the object that ``encode`` has made bytes of.

    Args:
        name: The object in messages.

    Raises:
        ValueError: The object can't be sent; or these bytes are not of ``encode``.
    """
    if kind == UNSENDABLE:
        raise ValueError(f"{name}: {data.decode(errors='replace')}")
    if kind == PICKLE and is_store_private():
        return pickle.loads(data)
    if kind != DATA:
        raise ValueError(f"{name}: a rank sent an object of the unknown kind {kind}")
    return load_data(io.BytesIO(data), name)


def load_data(file: BinaryIO, name: str) -> Any:
    """Return the tree in an archive of ``write_data``. No code in it is executed.

    Raises:
        ValueError: It is no such archive.
    """
    try:
        check_archive(file, file.seek(0, io.SEEK_END) - file.seek(0), Path(name))
        # b"" is pickled as a call of bytes(); check_archive refuses calls with arguments.
        with torch.serialization.safe_globals([bytes]):
            found = torch.load(file, map_location="cpu", weights_only=True)
        return state_tree.unflatten(found["skeleton"], found["tensors"])
    except DamagedCheckpointError as error:
        raise ValueError(f"{name} {error.reason}") from None
    except Exception as error:  # torch may raise any exception for invalid bytes
        raise ValueError(f"{name} can't be loaded ({error})") from None


def write_data(tree: Any, name: str, file: BinaryIO) -> None:
    """Write a tree of numbers, strings, tensors, arrays and containers as an archive.

    Args:
        name: Name of the tree in messages.

    Raises:
        ValueError: It contains something else; the message names its position.
    """
    skeleton, tensors = state_tree.flatten(tree, name)
    torch.save({"skeleton": skeleton, "tensors": tensors}, file)


def _as_data(value: Any) -> bytes | None:
    """Return an object as an archive; None if that would change the type of a part."""
    if not _keeps_types(value):
        return None
    file = io.BytesIO()
    try:
        write_data(value, "object", file)
    except ValueError:
        return None
    return file.getvalue()


def _keeps_types(value: Any, depth: int = 0) -> bool:
    """Return whether all parts of an object have the same types in an archive.

    An OrderedDict becomes a dict, which is accepted where there is no other way.
    """
    kind = type(value)
    if depth > state_tree.MAX_DEPTH:
        return False
    if kind is dict or (kind is OrderedDict and not is_store_private()):
        return all(
            _keeps_types(key, depth + 1) and _keeps_types(item, depth + 1)
            for key, item in value.items()
        )
    if kind in (list, tuple, set):
        return all(_keeps_types(item, depth + 1) for item in value)
    if kind is torch.Tensor:
        return value.device.type == "cpu" and not value.requires_grad
    numpy = sys.modules.get("numpy")
    return kind in _SCALARS or (numpy is not None and kind is numpy.ndarray)


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        try:
            import cloudpickle  # pickles lambdas and local classes, as Horovod does
        except ImportError:
            raise
        data: bytes = cloudpickle.dumps(value)
        return data


def _of_type(value: Any) -> str:
    return f"an object of type {type(value).__name__}"
