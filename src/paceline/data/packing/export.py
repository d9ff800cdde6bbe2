"""Write a packed dataset in another format, sample by sample, and verify each checksum."""

import errno
import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...security.files import InvalidFileError, read_regular
from ...security.folders import Folder, open_folder, replace_file
from ...security.removal import MARK, check_mark, remove_marked, write_mark
from ...security.text import printable
from ..format.shard_format import FILE, META_FILE, RAW, ZSTD
from ..shards import ScratchBuffer, Shards
from ..sources import formats
from ..sources.content import extension_of
from ..sources.formats import FORMATS, ExportInfo, Sample
from ..sources.source import EXTENSIONS
from .encode import function_name
from .pack import PackReport, describe_source, pack

PLAN_FILE = ".plan"
KIND = "unfinished export"  # of the mark of a folder beside DEST
MAX_PLAN_BYTES = 1 << 20
MAX_EXTENSION_CHARS = 16  # a longer suffix is not treated as a file extension
CONTENT_OPTIONS = ("decode", "resize", "compress", "cast", "apply")  # options that change samples
WRITABLE_FORMATS = tuple(name for name, kind in FORMATS.items() if kind.writable)


def export(
    packed: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    to: str,
    *,
    shard_bytes: int = 256 << 20,
    fresh: bool = False,
    step: Callable[[int, int], None] | None = None,
    prepare: Callable[[Path], None] | None = None,
) -> float:
    """Write a packed dataset in another format, in its order; return the seconds that it took.

    The result is a file for hdf5, and a folder for lmdb, tfrecord and webdataset. If writing fails,
    the unfinished output is removed.

    Args:
        shard_bytes: Target size of each output file.
        fresh: Replace an existing ``dest``.
        prepare: Called with the path of the unfinished output before it is written: may create an
            empty file (hdf5) or folder there, with a layout of its own.

    Raises:
        ValueError: The format is unknown or can't hold the data, ``dest`` exists, or the disk is
            full.
        DataError: A sample can't be read.
    """
    check_destination(dest, to, fresh)
    began, folder, shards = time.monotonic(), Path(dest), Shards(packed)
    alike = shards.meta.array if shards.row(0).encoding in (RAW, ZSTD) else None
    info = ExportInfo(shards.meta, alike, shard_bytes)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _private_folder(folder.with_name(f".{folder.name}.part")) as private:
            part = private / folder.name
            if prepare is not None:
                prepare(part)
            samples = _samples(shards, step or (lambda done, size: None))
            formats.write_dataset(to, part, info, samples)
            if fresh:
                _remove_files(folder)
            part.rename(folder)
    except OSError as error:
        raise _not_written(dest, error) from error
    return time.monotonic() - began


@contextmanager
def _private_folder(path: Path) -> Iterator[Path]:
    """Create a folder for the unfinished output, and remove it at the end.

    Only this user can write to the folder. In ``dest``'s folder, which other users may write to,
    the output could be a link that one of them has made. The folder of a killed call is replaced.

    Raises:
        OSError: Another user or another program has created the path, or it can't be created.
    """
    with suppress(FileNotFoundError):
        remove_marked(path, KIND)
    with Folder.make(path) as private:
        write_mark(private.fd, KIND)
        try:
            yield path
        finally:
            private.remove_all(last=MARK)


def _not_written(dest: str | os.PathLike[str], error: OSError) -> ValueError:
    """Return the error for output that can't be written."""
    name = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "make room" if full else f"choose a DEST other than {dest}, in a folder of yours"
    return ValueError(
        f"{dest} can't be written: {name}{error.strerror or error}. Nothing was written. "
        f"HINT: {hint}"
    )


def convert(
    source: Any,
    dest: str | os.PathLike[str],
    to: str,
    labels: Any = None,
    *,
    fresh: bool = False,
    step: Callable[[int, int], None] | None = None,
    prepare: Callable[[Path], None] | None = None,
    **options: Any,
) -> PackReport:
    """Write any source of ``pack``, with its options, in another format.

    The source is first packed into a folder next to ``dest``, which needs twice the space; an
    interrupted call is continued. A packed dataset whose samples do not change is written directly.
    ``prepare``: as for ``export``.
    """
    check_destination(dest, to, fresh)
    folder, report = Path(dest), None
    defaults = inspect.signature(pack).parameters
    changed = any(
        options.get(name, defaults[name].default) != defaults[name].default
        for name in CONTENT_OPTIONS
    )
    packed = Path(source) if isinstance(source, (str, os.PathLike)) else folder
    intermediate = changed or not (packed / META_FILE).exists()
    if intermediate:
        packed = folder.with_name(f".{folder.name}.packed")
        recorded_options = options | {"apply": function_name(options.get("apply"))}
        plan = (describe_source(source), describe_source(labels), sorted(recorded_options.items()))
        _prepare_intermediate(packed, repr(plan), fresh)
        if not (packed / META_FILE).exists():
            report = pack(source, packed, labels, step=step, **options)
    report = report or PackReport(Shards(packed).meta, 0.0)
    shard_bytes = options.get("shard_bytes", defaults["shard_bytes"].default)
    report.seconds += export(
        packed, dest, to, shard_bytes=shard_bytes, fresh=fresh, step=step, prepare=prepare
    )
    if intermediate:
        remove_marked(packed, KIND)
    return report


def _prepare_intermediate(packed: Path, plan: str, fresh: bool) -> None:
    """Keep an unfinished intermediate dataset of the same source and options; remove any other."""
    try:
        same = not fresh and read_regular(packed / PLAN_FILE, MAX_PLAN_BYTES) == os.fsencode(plan)
    except (OSError, InvalidFileError):
        same = False
    try:
        if not same:
            with suppress(FileNotFoundError):
                remove_marked(packed, KIND)
            packed.mkdir(parents=True)
        opened = open_folder(packed)
        try:
            if not same:
                write_mark(opened, KIND)
                replace_file(PLAN_FILE, os.fsencode(plan), dir_fd=opened)
            check_mark(opened, packed, KIND)
        finally:
            os.close(opened)
    except OSError as error:
        raise _not_written(packed, error) from error


def check_destination(dest: str | os.PathLike[str], to: str, fresh: bool) -> None:
    """Raise ValueError if the format can't be written or ``dest`` can't be replaced."""
    if to not in WRITABLE_FORMATS:
        raise ValueError(
            f"--to must be {', '.join(WRITABLE_FORMATS)}; this is {to!r}. HINT: --to hdf5"
        )
    path = Path(dest)
    if path.exists() and not fresh:
        raise ValueError(
            f"{dest} exists. HINT: choose another name, or replace it: fresh=True (--fresh)"
        )
    if path.exists() and not (
        path.is_file() if to == "hdf5" else formats.detect_format(path) == to
    ):
        raise ValueError(f"{dest} exists and is not in the format {to}. HINT: choose another name")
    if path.is_dir() and (others := formats.other_names(path, to)):
        raise ValueError(
            f"{dest} contains {printable(others[0])}, which is not a file of the format {to}. "
            "HINT: choose another name"
        )


def _samples(shards: Shards, step: Callable[[int, int], None]) -> Iterator[Sample]:
    scratch, size = ScratchBuffer(), 0
    for i in range(len(shards)):
        row, data, label = shards.read_raw(i, scratch)
        name = shards.name(i)
        if row.encoding in (RAW, ZSTD):
            array: Any = np.array(shards.decode_sample(i, row, data))
            sample = Sample(array, label, name, ".npy")
        else:
            content = bytes(data)
            extension = os.path.splitext(name)[1].lower()
            if not (2 <= len(extension) <= MAX_EXTENSION_CHARS and extension.isprintable()):
                extension = EXTENSIONS[row.encoding]
            if row.encoding != FILE:
                extension = extension_of(content, extension)
            sample = Sample(content, label, name, extension)
        yield sample
        size += row.length
        step(i + 1, size)


def _remove_files(path: Path) -> None:
    """Remove a dataset of another format, which ``check_destination`` has accepted."""
    if path.is_dir() and not path.is_symlink():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
