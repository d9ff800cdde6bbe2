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
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import shard_format
from .bringing import Bringing, Staged, Step, whole
from .room import free
from .shard_format import DataError, Meta, Shard
from .sharing import UNCHECKED, Exchange, GoneError, join

PLACE, VARIABLE = "paceline-stage", "PACELINE_STAGE"
SETS = "PACELINE_STAGE_SETS"  # that ``paceline run --stage`` names
USED = ".used"  # its time: when the set was staged or opened last
THREADS = 2  # a checksum beside a read


def stage(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    room: int | None = None,
    threads: int = THREADS,
    step: Step | None = None,
    waits: Callable[[], None] | None = None,
    together: bool = False,
    ended: Callable[[Staged], None] | None = None,
) -> Staged:
    """Bring the packed set ``source`` to the folder ``root``. room: bytes that all staged sets
    together may take there; default what is free (in memory: what the job may still use) but for
    a tenth. Sets that were not used for longest make room. Shards that have none stay where they
    are, and are read from there. waits: is called where another process has to end first.

    together: with the other hosts of the job that this process's variables name, each of which
    calls this once: every byte is read once from ``source``, and fetched by the others from the
    host that has read it (sharing.py). A host without room for all reads a part that no other
    host reads. Returns when all hosts have what they want; ended: is called when this one has.
    What goes wrong on one host is then in the result, and the others go on.

    Raises ValueError for a source that is no whole set, a root that can't be written to, and a
    disk that fills up meanwhile; DataError where a shard is not what was packed.
    """
    began, origin = time.monotonic(), Path(source)
    meta = shard_format.load(origin)
    files = _files(origin, meta)
    found = Staged(place(origin, Path(root)), len(meta.shards), socket.gethostname())
    tell = step or (lambda done, size: None)
    exchange = _joined(files, found) if together else None
    try:
        try:
            _brought(origin, Path(root), files, room, threads, tell, waits, exchange, found)
        except ValueError as mistake:
            if exchange is None:
                raise
            found.error = str(mistake)
        found.left = [one.file for one in meta.shards if not whole(found.folder, one)]
        found.here = found.shards - len(found.left)
        found.seconds = time.monotonic() - began
        if ended is not None:
            ended(found)
        if exchange is not None:
            exchange.end(_plain(found))
            found.hosts = exchange.linger(lambda: tell(found.copied, found.bytes))
    except BaseException as error:
        if exchange is not None:  # nobody waits for this host
            exchange.end(_plain(found) | {"error": found.error or type(error).__name__})
        raise
    finally:
        if exchange is not None:
            exchange.close()
    return found


def _brought(
    origin: Path,
    root: Path,
    files: list[Shard],
    room: int | None,
    threads: int,
    tell: Step,
    waits: Callable[[], None] | None,
    exchange: Exchange | None,
    found: Staged,
) -> None:
    folder = found.folder
    with _told(root), _alone(folder.parent, waits):
        folder.mkdir(exist_ok=True)
        (folder / USED).touch()
        missing = [one for one in files if not whole(folder, one)]
        budget = _made_room(missing, origin, folder, room, found)
        try:
            Bringing(origin, folder, files, budget, exchange, found).run(threads, tell)
        finally:
            for part in folder.glob(".part-*"):
                part.unlink(missing_ok=True)


def _files(origin: Path, meta: Meta) -> list[Shard]:
    """All of a set but for paceline.json: what has no checksum of its own first, as it is small."""
    names = [shard_format.INDEX, *([shard_format.NAMES] if meta.names else [])]
    small = [Shard(name, 0, (origin / name).stat().st_size, UNCHECKED) for name in names]
    return [*small, *meta.shards]


def _joined(files: list[Shard], found: Staged) -> Exchange | None:
    try:
        return join(found.folder, files, os.environ)
    except GoneError as error:
        why = str(error).splitlines()[0] if str(error) else "no answer"
        found.notes.append(f"the job's store does not answer ({why}): {found.host} reads all alone")
        return None


def _plain(found: Staged) -> dict[str, Any]:
    return asdict(found) | {"folder": str(found.folder), "hosts": []}


def place(origin: Path, root: Path) -> Path:
    """Where a set is, or would be."""
    told = shard_format.identity(origin)
    return root / PLACE / f"{origin.resolve().name}-{told}"


def begin_all() -> None:
    """At a rank's start: what ``paceline run --stage`` names comes before the script asks for it,
    on all hosts."""
    root = os.environ.get(VARIABLE)
    for one in filter(None, os.environ.get(SETS, "").split(os.pathsep)):
        try:
            folder = place(Path(one), Path(root or ""))
        except (OSError, ValueError):  # the script says so, if it opens it
            continue
        begin(Path(one), folder)


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


def _made_room(
    missing: list[Shard], origin: Path, folder: Path, room: int | None, found: Staged
) -> int:
    """Bytes that may come: other sets go until what is missing fits, the longest unused first."""
    own, meta = folder.parent, shard_format.META
    beside = 0 if (folder / meta).exists() else (origin / meta).stat().st_size
    wanted = sum(one.bytes for one in missing) + beside
    others = sorted(
        (one for one in own.iterdir() if one != folder and (one / USED).exists()),
        key=lambda one: (one / USED).stat().st_mtime,
    )
    while True:
        left = free(own)
        if room is not None:
            left = min(left, room - sum(_size(one) for one in own.iterdir() if one.is_dir()))
        if wanted <= left or not others:
            return left - beside
        gone = others.pop(0)
        shutil.rmtree(gone, ignore_errors=True)  # who reads it has it open, or goes to the source
        found.evicted.append(gone.name)


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
