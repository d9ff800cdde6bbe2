"""``paceline stage``: a packed set's shards on storage of the host's own.

    ROOT/paceline-stage/NAME-CHECKSUM/shard-00000.bin   whole, or not there
                                     /.part             what is being copied
                                     /paceline.json     of what set it is

A set is known by the checksum of its paceline.json, so one of that name that was packed anew is
another. Shards come one by one under their names, each compared with its checksum; a set is read
from here as far as it is here (``Shards``), and from where it was packed for the rest. So training
may begin while it comes, and a kill leaves nothing half trusted. One process at a time stages to a
ROOT: the next one waits, and finds what was done.
"""

import errno
import fcntl
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from crc32c import crc32c

from . import shard_format
from .room import free
from .shard_format import DataError, Meta, Shard

PLACE, VARIABLE = "paceline-stage", "PACELINE_STAGE"
SETS = "PACELINE_STAGE_SETS"  # that ``paceline run --stage`` names
USED = ".used"  # its time: when the set was staged or opened last
CHUNK = 1 << 20  # larger ones cost a disk's file system twice the processor time
THREADS = 2  # a checksum beside a read
Step = Callable[[int, int], None]  # shards that are done, and bytes


@dataclass
class Staged:
    """What is there now. here, copied: shards, all and those of this call. left: shards for which
    there was no room. evicted: other sets that made room."""

    folder: Path
    shards: int
    here: int = 0
    copied: int = 0
    bytes: int = 0
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)


def stage(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    room: int | None = None,
    threads: int = THREADS,
    step: Step | None = None,
    waits: Callable[[], None] | None = None,
) -> Staged:
    """Bring the packed set ``source`` to the folder ``root``. room: bytes that all staged sets
    together may take there; default what is free (in memory: what the job may still use) but for
    a tenth. Sets that were not used for longest make room. Shards that have none stay where they
    are, and are read from there. waits: is called where another process has to end first.

    Raises ValueError for a source that is no whole set, a root that can't be written to, and a
    disk that fills up meanwhile; DataError where a shard is not what was packed.
    """
    began, origin = time.monotonic(), Path(source)
    meta = shard_format.load(origin)
    folder = place(origin, Path(root))
    with _told(Path(root)), _alone(folder.parent, waits):
        folder.mkdir(exist_ok=True)
        found = Staged(folder, len(meta.shards))
        (folder / USED).touch()
        missing = [one for one in meta.shards if not _whole(folder, one)]
        small = [name for name in _beside(meta) if not (folder / name).exists()]
        beside = sum((origin / name).stat().st_size for name in small)
        chosen = _fitting(missing, beside, folder, room, found)
        for name in small:
            part = folder / f".part-{name}"
            shutil.copyfile(origin / name, part)
            part.replace(folder / name)
        tell = step or (lambda done, size: None)
        pool = ThreadPoolExecutor(threads, "paceline-stage")
        try:
            jobs = [pool.submit(_shard, origin, folder, one) for one in chosen]
            for one, job in zip(chosen, jobs, strict=True):
                job.result()
                found.copied += 1
                found.bytes += one.bytes
                tell(found.copied, found.bytes)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for part in folder.glob(".part-*"):
                part.unlink(missing_ok=True)
    found.here = sum(_whole(folder, one) for one in meta.shards)
    found.seconds = time.monotonic() - began
    return found


def place(origin: Path, root: Path) -> Path:
    """Where a set is, or would be."""
    told = shard_format.identity(origin)
    return root / PLACE / f"{origin.resolve().name}-{told}"


def here(origin: Path) -> Path | None:
    """The set's folder on this host, if some of it was staged to $PACELINE_STAGE."""
    root = os.environ.get(VARIABLE)
    if not root:
        return None
    folder = place(origin, Path(root))
    begin(origin, folder)
    try:
        (folder / USED).touch()
    except OSError:
        return None
    return folder


_begun: dict[Path, "subprocess.Popen[bytes]"] = {}  # by this process


def begin(origin: Path, folder: Path) -> None:
    """Of a set that ``paceline run --stage`` names: the first rank of each host has it staged
    beside the training, by a process that ends with it."""
    if str(origin.resolve()) not in os.environ.get(SETS, "").split(os.pathsep):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)  # all ranks look here for what comes
    except OSError:  # staging says so
        pass
    first = os.environ.get("LOCAL_RANK", "0") == "0" and multiprocessing.parent_process() is None
    if first and folder not in _begun:
        words = [sys.executable, "-m", "paceline", "stage", "--beside", str(origin)]
        quiet = subprocess.DEVNULL
        _begun[folder] = subprocess.Popen(words, stdin=quiet, stdout=quiet)


def _beside(meta: Meta) -> list[str]:
    """What is not checked shard by shard: the index, whose rows have checksums; the names; and
    what the set is, last."""
    return [shard_format.INDEX, *([shard_format.NAMES] if meta.names else []), shard_format.META]


def _whole(folder: Path, shard: Shard) -> bool:
    try:
        return (folder / shard.file).stat().st_size == shard.bytes
    except FileNotFoundError:
        return False


def _shard(origin: Path, folder: Path, shard: Shard) -> None:
    part = folder / f".part-{shard.file}"
    with part.open("wb", buffering=0) as file:
        crc = _copied(origin / shard.file, file)
    if crc != shard.crc:
        raise DataError(origin / shard.file, -1, 0, "a byte has changed (its checksum is another)")
    part.replace(folder / shard.file)


def _copied(path: Path, to: BinaryIO) -> int:
    """The checksum of what was copied."""
    crc, buffer = 0, memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while size := file.readinto(buffer):
            crc = crc32c(buffer[:size], crc)
            done = 0
            while done < size:
                done += to.write(buffer[done:size])
    return crc


def _fitting(
    missing: list[Shard], beside: int, folder: Path, room: int | None, found: Staged
) -> list[Shard]:
    """Those of the missing shards that there is room for, with so many bytes beside them; other
    sets go, the longest unused first."""
    own = folder.parent
    wanted = sum(shard.bytes for shard in missing) + beside
    others = sorted(
        (one for one in own.iterdir() if one != folder and (one / USED).exists()),
        key=lambda one: (one / USED).stat().st_mtime,
    )
    while True:
        left = free(own)
        if room is not None:
            left = min(left, room - sum(_size(one) for one in own.iterdir() if one.is_dir()))
        if wanted <= left or not others:
            break
        gone = others.pop(0)
        shutil.rmtree(gone, ignore_errors=True)  # who reads it has it open, or goes to the source
        found.evicted.append(gone.name)
    chosen, left = [], left - beside
    for shard in missing:
        if shard.bytes <= left:
            chosen.append(shard)
            left -= shard.bytes
        else:
            found.left.append(shard.file)
    return chosen


def _size(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())


@contextmanager
def _alone(own: Path, waits: Callable[[], None] | None) -> Iterator[None]:
    """While no other process stages to the same root; its lock ends with it."""
    own.mkdir(parents=True, exist_ok=True)
    with (own / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waits is not None:
                waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _told(root: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        way = "HINT: a folder of this host's own that can be written to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            way = "What is there is kept. HINT: make room, or give less of it (--room)"
        where = error.filename or root
        raise ValueError(f"{where}: {error.strerror or error}. {way}") from error
