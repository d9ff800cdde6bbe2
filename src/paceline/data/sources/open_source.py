"""Open the source that the user named: a folder, an array, a packed dataset, a file of another
format, or a Python function that yields samples."""

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...security.processes import import_folders
from ...security.text import printable
from ..format import shard_format
from ..format.shard_format import DataError
from . import formats
from .content import ARRAYS, COMPRESSED_SUFFIXES
from .folder_source import FolderSource
from .source import ArraySource, ShardSource, Source, StreamSource


def import_function(name: str, function_of: str = "") -> Any:
    """Import "MODULE:FUNCTION", with the working directory on the search path. function_of: the
    option whose value must be a function. Raises ValueError if it can't be imported or called."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # stays there: a generator may import later
        sys.path[:] = import_folders(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} can't be imported: {error}. HINT: MODULE:FUNCTION, where the module is in "
            "the working directory or installed"
        ) from None
    if function_of and not callable(found):
        raise ValueError(
            f"{function_of} {name} must be a function; this is a {type(found).__name__}. "
            f"HINT: {function_of} MODULE:FUNCTION"
        )
    return found


def open_stream(name: str) -> StreamSource:
    """Open the stream of "MODULE:FUNCTION"."""
    target = import_function(name)
    return StreamSource(target() if callable(target) else target, name)


def open_source(source: Any, labels: Any, work: Path, follow_links: bool = False) -> Source:
    """Open the source that the user named. work: folder for files needed while it is packed.
    follow_links: whether files outside of the source's folder are read as well."""
    if not isinstance(source, (str, os.PathLike)):
        if isinstance(source, tuple) and labels is None and len(source) == 2:
            return ArraySource(*source)
        if hasattr(source, "__array__"):
            return ArraySource(source, labels)
        if isinstance(source, Iterable):
            return StreamSource(source, type(source).__name__)
        raise ValueError(
            f"pack: {type(source).__name__} is not a source. HINT: pass a folder, an array or an "
            "iterable of samples"
        )
    path, name = formats.split_path(os.fspath(source))
    if formats.detect_format(path):
        named = None if labels is None else os.fspath(labels)
        return formats.open_source(path, name, named, follow_links)
    path = Path(source)
    if path.suffix in ARRAYS:
        return ArraySource(path, labels)
    if (path / shard_format.META_FILE).exists():
        return ShardSource(path)
    if path.is_dir():
        folder = FolderSource(path, None if labels is None else Path(labels), work, follow_links)
        if labels is None and folder.kind == "files":
            _check_no_datasets(folder)
        return folder
    if ":" in str(source) and not path.exists():
        return open_stream(str(source))
    if not path.exists():
        raise DataError(path, -1, 0, "the file or folder does not exist")
    formats.check_compression(path)
    raise ValueError(
        f"{path} can't be packed. HINT: pass a folder of files, a .npy file, a packed dataset, "
        f"{', '.join(formats.FORMATS)}, or MODULE:FUNCTION that yields samples"
    )


def _check_no_datasets(folder: FolderSource) -> None:
    """Raise ValueError if the files of a folder are datasets, of which each would be packed as one
    sample."""
    for name in folder.first_names.values():
        plain, end = os.path.splitext(folder.folder / name)
        path = Path(plain if end.lower() in COMPRESSED_SUFFIXES else folder.folder / name)
        kind = formats.format_of_file(path)
        if path.suffix.lower() == ".tgz" or (kind and formats.FORMATS[kind].files):
            raise ValueError(
                f"{folder.folder} contains {printable(name)}, a dataset of many samples, in a "
                "folder or beside other files, or compressed. HINT: paceline pack "
                f"{folder.folder / Path(name).parent} DEST, where all files are decompressed and "
                "of one format"
            )
