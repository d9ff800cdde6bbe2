"""Other dataset formats that ``paceline pack`` reads and, with ``--to``, writes.

Each is a module with ``source(path, name, labels, boundary)``, which returns a Source, and most
have ``write(path, info, samples)``. Their packages are optional: pip install 'paceline[formats]'.
"""

import errno
import importlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, NamedTuple

from ....security.files import InvalidFileError, UnsafeFileError, kind_of_file, read_regular
from ....security.text import printable
from ...boundary import Boundary
from ...format.decode import import_optional
from ...format.meta_schema import ArraySpec, DatasetMeta
from ..bounded_read import read_head
from ..content import DECOMPRESS, compression_of
from ..source import Source


@dataclass(frozen=True)
class Format:
    """A format and how it is recognised.

    Attributes:
        module: Module of this package that reads it.
        library: Package that reads it, if that is native code.
        extensions: Extensions of a file or folder.
        files: Pattern that all files match in a folder of several.
        marks: File names of which a folder that is one dataset holds some.
        beside: Other files in such a folder.
        writable: Whether it can be written.
    """

    module: str
    library: str
    extensions: tuple[str, ...]
    files: str = ""
    marks: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    writable: bool = False


FORMATS = {
    "hdf5": Format("hdf5", "h5py", (".h5", ".hdf5", ".he5"), writable=True),
    "netcdf": Format("netcdf", "netCDF4", (".nc", ".nc4", ".cdf")),
    "zarr": Format("zarrs", "zarr", (".zarr",), marks=("zarr.json", ".zgroup", ".zarray")),
    "lmdb": Format(
        "lmdbs", "lmdb", (".lmdb", ".mdb"), marks=("data.mdb",), beside=("lock.mdb",), writable=True
    ),
    "tfrecord": Format(
        "tfrecord", "", (".tfrecord", ".tfrecords", ".tfrec"), "*.tfrec*", writable=True
    ),
    "webdataset": Format("webdataset", "", (".tar",), "*.tar", writable=True),
    "parquet": Format("parquet", "pyarrow", (".parquet",), "*.parquet"),
}
CLASSES_FILE = "classes.txt"  # class names, beside files of formats that can't hold them
MAX_CLASSES_BYTES = 16 << 20
MAX_NAMES_INSPECTED = 1000  # of a folder, to detect its format
SHARD_NAME = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
BESIDE = (".txt", ".md", ".json")  # extensions of lists and descriptions


class Sample(NamedTuple):
    """One sample to write.

    Attributes:
        data: An array, or the bytes of a file of kind ``extension``.
        label: A class, an array or None.
    """

    data: Any
    label: Any
    name: str
    extension: str


@dataclass(frozen=True)
class ExportInfo:
    """The dataset to write.

    Attributes:
        array: Dtype and shape if all samples are arrays of one shape; else None.
        shard_bytes: Target size of each file, for formats with several files.
    """

    meta: DatasetMeta
    array: ArraySpec | None
    shard_bytes: int


def detect_format(path: Path) -> str | None:
    """Return the format of a file or folder, by its name or content; None if unknown."""
    if not path.is_dir():
        return format_of_file(path) if path.is_file() else None
    inside = list(islice(_entries(path), MAX_NAMES_INSPECTED))
    for name, kind in FORMATS.items():
        if kind.marks and inside and path.suffix.lower() in kind.extensions:
            return name
        if any((path / mark).exists() for mark in kind.marks):
            return name
    first = format_of_file(inside[0]) if inside else None
    several = first is not None and FORMATS[first].files
    return first if several and all(format_of_file(entry) == first for entry in inside) else None


def format_of_file(path: Path) -> str | None:
    """Return the format of a file: by its name, or for names such as train-00000-of-00008 by its
    first bytes. None if unknown."""
    for name, kind in FORMATS.items():
        if path.suffix.lower() in kind.extensions or fnmatch(path.name, kind.files):
            return name
    if SHARD_NAME.search(path.name) and path.is_file():
        from .tfrecord import begins_with_record

        return "tfrecord" if begins_with_record(read_head(path)) else None
    return None


def data_files(path: Path) -> list[Path]:
    """Return the files of a dataset: a file, or those of a folder and of its Hive partitions."""
    return sorted(_entries(path)) if path.is_dir() else [path]


def _entries(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder and in its partitions (year=2020), without hidden files, those of
    other tools (_SUCCESS of Spark), and lists and descriptions beside the data."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith((".", "_")) or entry.name.endswith(BESIDE):
                continue
            if "=" in entry.name and entry.is_dir(follow_symlinks=False):
                yield from _entries(folder / entry.name)
            else:
                yield folder / entry.name


def check_compression(path: Path) -> None:
    """Raise ValueError if a file is compressed as a whole: its reader would call it damaged."""
    kind = compression_of(read_head(path))
    if kind:
        raise ValueError(
            f"{path} is compressed with {kind}. HINT: decompress it first: "
            f"{DECOMPRESS[kind]} < {path} > NEW"
        )


def other_names(folder: Path, to: str) -> list[str]:
    """Return the names in a folder that ``write_dataset`` does not write in the format ``to``."""
    kind = FORMATS[to]
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_dir(follow_symlinks=False)
        or not (
            entry.name in (*kind.marks, *kind.beside, CLASSES_FILE)
            or (kind.files and fnmatch(entry.name, kind.files))
        )
    )


def split_path(text: str) -> tuple[Path, str]:
    """Split PATH:NAME into the path and the name of an array, column or feature in it."""
    path, _, name = text.rpartition(":")
    if path and not Path(text).exists() and Path(path).exists():
        return Path(path), name
    return Path(text), ""


def open_source(path: Path, name: str, labels: str | None, follow_links: bool = False) -> Source:
    """Open a file or folder. Raises ValueError if it can't be read, is ambiguous, or refers to
    files outside of its folder without ``follow_links``."""
    kind = detect_format(path)
    assert kind is not None
    module = importlib.import_module(f".{FORMATS[kind].module}", __name__)
    with convert_library_errors(path):
        boundary = Boundary(path, follow_links)
        check_files(path, boundary)
        if path.is_file():
            check_compression(path)
        found: Source = module.source(path, name, labels, boundary)
    return found


def check_files(path: Path, boundary: Boundary) -> None:
    """Check that a file, or all files below a folder, are regular files, or links to regular files
    inside of the boundary: a library would wait for a FIFO forever. Hidden files count, and each
    folder is checked once.

    Raises:
        UnsafeFileError: One is a FIFO, socket or device.
        ValueError: A link leads out of the boundary.
    """
    waiting, seen = [path], set[tuple[int, int]]()
    beside = path.parent / CLASSES_FILE
    if beside.is_symlink() and not path.is_dir():
        boundary.check(beside, f"the link {beside}")
    while waiting:
        item = waiting.pop()
        status = item.stat()
        if not S_ISDIR(status.st_mode):
            if not S_ISREG(status.st_mode):
                kind = kind_of_file(status.st_mode)
                raise UnsafeFileError(errno.EINVAL, f"is {kind} and no regular file", str(item))
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(item) as found:
            for entry in found:
                if entry.is_symlink():
                    boundary.check(entry.path, f"the link {entry.path}")
                if not entry.is_file(follow_symlinks=False):
                    waiting.append(item / entry.name)


@contextmanager
def convert_library_errors(description: object) -> Iterator[None]:
    """Raise ValueError instead of the arbitrary errors of a library that reads a damaged file."""
    try:
        yield
    except UnsafeFileError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, OSError):
        raise
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        reason = f"can't be read: {printable(words)}. HINT: copy it again"
        raise InvalidFileError(printable(str(description)), reason) from error


def write_dataset(to: str, path: Path, info: ExportInfo, samples: Iterator[Sample]) -> None:
    """Write samples in format ``to``. Raises ValueError if the format can't hold them."""
    module = importlib.import_module(f".{FORMATS[to].module}", __name__)
    module.write(path, info, samples)


def read_class_names(path: Path) -> list[str]:
    """Return the class names from the file beside ``path``, or in it; [] if there is none."""
    file = (path if path.is_dir() else path.parent) / CLASSES_FILE
    try:
        return read_regular(file, MAX_CLASSES_BYTES).decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        return []


def write_classes(folder: Path, info: ExportInfo) -> None:
    """Write the class names for ``read_class_names``."""
    if info.meta.classes:
        (folder / CLASSES_FILE).write_text("".join(f"{name}\n" for name in info.meta.classes))


def import_format_package(module: str, name: str = "") -> Any:
    """Import an optional package."""
    return import_optional(module, name, "formats")
