"""A packed set in a format of others', sample by sample, each with its checksum compared."""

import inspect
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...security.files import InvalidFileError, read_regular
from ..format.shard_format import META_FILE, RAW, ZSTD
from ..shards import ScratchBuffer, Shards
from ..sources import formats
from ..sources.formats import FORMATS, About, Sample
from ..sources.source import ENDS, by_magic
from .encode import named
from .pack import Report, pack, told

PLAN = ".plan"
MAX_PLAN_BYTES = 1 << 20
MAX_END = 16  # characters of a name's end that are taken for a kind of file
HOW = ("decode", "resize", "compress", "cast", "apply")  # options of pack that change samples
WRITES = tuple(name for name, kind in FORMATS.items() if kind.writes)


def export(
    packed: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    to: str,
    *,
    shard_bytes: int = 256 << 20,
    fresh: bool = False,
    step: Callable[[int, int], None] | None = None,
) -> float:
    """Write a packed set to ``dest``, in its order: a file for hdf5, a folder for lmdb, tfrecord
    and webdataset. shard_bytes: of each of its files, about. fresh: in the place of what is there.
    Nothing is left where it fails. Returns seconds.

    Raises ValueError for another format, a ``dest`` that exists, what has no place in the format,
    and a disk that is full; DataError for a sample that can't be read.
    """
    check(dest, to, fresh)
    began, folder, shards = time.monotonic(), Path(dest), Shards(packed)
    part = folder.with_name(f".{folder.name}.part")
    _removed(part)
    alike = shards.meta.array if shards.row(0).encoding in (RAW, ZSTD) else None
    about = About(shards.meta, alike, shard_bytes)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        formats.written(to, part, about, _samples(shards, step or (lambda done, size: None)))
        if fresh:
            _removed(folder)
        part.rename(folder)
    except OSError as error:
        raise ValueError(f"{dest}: {error.strerror or error}. Nothing was written") from error
    finally:
        _removed(part)
    return time.monotonic() - began


def converted(
    source: Any,
    dest: str | os.PathLike[str],
    to: str,
    labels: Any = None,
    *,
    fresh: bool = False,
    step: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Report:
    """Any source of ``pack``, with its options, in another format. It is packed beside ``dest``
    first, which needs the room twice, and goes on where it was stopped; a packed set whose samples
    stay as they are is written at once."""
    check(dest, to, fresh)
    folder, report = Path(dest), None
    usual = inspect.signature(pack).parameters
    changed = any(options.get(name, usual[name].default) != usual[name].default for name in HOW)
    packed = Path(source) if isinstance(source, (str, os.PathLike)) else folder
    own = changed or not (packed / META_FILE).exists()
    if own:
        packed = folder.with_name(f".{folder.name}.packed")
        how = options | {"apply": named(options.get("apply"))}
        _meant(packed, repr((told(source), told(labels), sorted(how.items()))), fresh)
        if not (packed / META_FILE).exists():
            report = pack(source, packed, labels, step=step, **options)
    report = report or Report(Shards(packed).meta, 0.0)
    shard_bytes = options.get("shard_bytes", usual["shard_bytes"].default)
    report.seconds += export(packed, dest, to, shard_bytes=shard_bytes, fresh=fresh, step=step)
    if own:
        shutil.rmtree(packed)
    return report


def _meant(packed: Path, plan: str, fresh: bool) -> None:
    """What a call that was stopped has left is gone on with, if it was of the same."""
    try:
        same = not fresh and read_regular(packed / PLAN, MAX_PLAN_BYTES) == os.fsencode(plan)
    except (OSError, InvalidFileError):
        same = False
    if not same:
        _removed(packed)
        packed.mkdir(parents=True)
        (packed / PLAN).write_bytes(os.fsencode(plan))


def check(dest: str | os.PathLike[str], to: str, fresh: bool) -> None:
    """Raises ValueError where it can't be begun."""
    if to not in WRITES:
        raise ValueError(f"--to {to}: is not written. HINT: {', '.join(WRITES)}")
    path = Path(dest)
    if path.exists() and not fresh:
        raise ValueError(f"{dest}: exists. HINT: another name, or fresh=True (--fresh)")
    if path.exists() and not (path.is_file() if to == "hdf5" else formats.known(path) == to):
        raise ValueError(f"{dest}: exists, and is no {to}. HINT: another name")


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
            end = os.path.splitext(name)[1].lower()
            if len(end) < 2 or len(end) > MAX_END or not end.isprintable():
                end = by_magic(content)
            sample = Sample(content, label, name, end if end != ".bin" else ENDS[row.encoding])
        yield sample
        size += row.length
        step(i + 1, size)


def _removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
