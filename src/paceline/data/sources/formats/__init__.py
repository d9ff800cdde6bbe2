"""Formats of others: what ``paceline pack`` reads, and with ``write`` what ``--to`` makes.

Each is a module with ``source(path, name, labels)``, which gives a Source, and most have
``write(path, about, samples)``. Their packages are optional: pip install 'paceline[formats]'.
"""

import errno
import importlib
import os
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
from ...format.decode import import_optional
from ...format.shard_format import ArraySpec, DatasetMeta
from ..source import Source


@dataclass(frozen=True)
class Format:
    """library: what reads it, where that is made in C. ends: of a file's or folder's name. files: a
    pattern of all that a folder of several holds; marks: names of which a folder that is one holds
    some."""

    module: str
    library: str
    ends: tuple[str, ...]
    files: str = ""
    marks: tuple[str, ...] = ()
    writes: bool = False


FORMATS = {
    "hdf5": Format("hdf5", "h5py", (".h5", ".hdf5", ".he5"), writes=True),
    "netcdf": Format("netcdf", "netCDF4", (".nc", ".nc4", ".cdf")),
    "zarr": Format("zarrs", "zarr", (".zarr",), marks=("zarr.json", ".zgroup", ".zarray")),
    "lmdb": Format("lmdbs", "lmdb", (".lmdb", ".mdb"), marks=("data.mdb",), writes=True),
    "tfrecord": Format(
        "tfrecord", "", (".tfrecord", ".tfrecords", ".tfrec"), "*.tfrec*", writes=True
    ),
    "webdataset": Format("webdataset", "", (".tar",), "*.tar", writes=True),
    "parquet": Format("parquet", "pyarrow", (".parquet",), "*.parquet"),
}
CLASSES = "classes.txt"  # their names, beside files that have no place for them
MAX_CLASSES_BYTES = 16 << 20
LOOKS = 1000  # names of a folder, to tell what it is


class Sample(NamedTuple):
    """One to be written. data: an array, or a file's bytes, whose kind ``end`` says. label: a
    class, an array or None."""

    data: Any
    label: Any
    name: str
    end: str


@dataclass(frozen=True)
class About:
    """What is written. array: what all samples are, where they are arrays of one shape and not
    files' bytes. shard_bytes: of each file, where there are several."""

    meta: DatasetMeta
    array: ArraySpec | None
    shard_bytes: int


def known(path: Path) -> str | None:
    """The format of a file or folder, by what it is called or holds."""
    inside = _inside(path)
    for name, kind in FORMATS.items():
        if path.suffix.lower() in kind.ends and (path.is_file() or (kind.marks and inside)):
            return name
        if any(mark in inside for mark in kind.marks):
            return name
        if inside and kind.files and all(fnmatch(one, kind.files) for one in inside):
            return name
    return None


def _inside(path: Path) -> list[str]:
    """Names in a folder, the first ones; lists and descriptions beside the data left out."""
    if not path.is_dir():
        return []
    with os.scandir(path) as found:
        names = [entry.name for entry in islice(found, LOOKS)]
    marks = [mark for kind in FORMATS.values() for mark in kind.marks]
    beside = (".txt", ".md", ".json")
    return [
        name
        for name in names
        if name in marks or not (name.startswith(".") or name.endswith(beside))
    ]


def split(text: str) -> tuple[Path, str]:
    """A path and, behind a colon, the name of an array, column or feature in it."""
    path, _, name = text.rpartition(":")
    if path and not Path(text).exists() and Path(path).exists():
        return Path(path), name
    return Path(text), ""


def source(path: Path, name: str, labels: str | None) -> Source:
    """Raises ValueError for what can't be read, or where it is not clear what is meant."""
    kind = known(path)
    assert kind is not None
    module = importlib.import_module(f".{FORMATS[kind].module}", __name__)
    with damage_told(path):
        check_regular_files(path)
        found: Source = module.source(path, name, labels)
    return found


def check_regular_files(path: Path) -> None:
    """Check that a file, or all files below a folder, are regular ones or links to such: a library
    would wait for a FIFO without end. Hidden files count, and each folder is looked at once.

    Raises:
        UnsafeFileError: One is a FIFO, socket or device.
    """
    waiting, seen = [path], set[tuple[int, int]]()
    while waiting:
        one = waiting.pop()
        status = one.stat()
        if not S_ISDIR(status.st_mode):
            if not S_ISREG(status.st_mode):
                kind = kind_of_file(status.st_mode)
                raise UnsafeFileError(errno.EINVAL, f"is {kind} and no regular file", str(one))
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(one) as found:
            waiting += [
                one / entry.name for entry in found if not entry.is_file(follow_symlinks=False)
            ]


@contextmanager
def damage_told(told: object) -> Iterator[None]:
    """What a library raises where it stumbles over a damaged file, as a ValueError."""
    try:
        yield
    except UnsafeFileError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, OSError):
        raise
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        reason = f"can't be read: {printable(words)}. HINT: copy it again"
        raise InvalidFileError(printable(str(told)), reason) from error


def written(to: str, path: Path, about: About, samples: Iterator[Sample]) -> None:
    """Raises ValueError where a format has no place for such samples."""
    module = importlib.import_module(f".{FORMATS[to].module}", __name__)
    module.write(path, about, samples)


def classes_beside(path: Path) -> list[str]:
    """The classes' names beside a file, or in a folder of several; none where nothing is said."""
    told = (path if path.is_dir() else path.parent) / CLASSES
    try:
        return read_regular(told, MAX_CLASSES_BYTES).decode().splitlines()
    except FileNotFoundError:
        return []


def write_classes(folder: Path, about: About) -> None:
    """As ``classes_beside`` finds them."""
    if about.meta.classes:
        (folder / CLASSES).write_text("".join(f"{name}\n" for name in about.meta.classes))


def needed(module: str, name: str = "") -> Any:
    """A package that is optional."""
    return import_optional(module, name, "formats")
