"""``paceline stage``: a packed set's shards on storage of the host's own.

    ROOT/paceline-stage-USER/NAME-CHECKSUM/shard-00000.bin   whole, or not there
                                          /.*.part           what is being copied
                                          /paceline.json     of what set it is

The folder is this user's alone (security.folders; USER is his number). Shared with a group it is
ROOT/paceline-stage-group-GROUP, made and read by the members of the group that owns the set: then
the index is always the origin's, so that each sample is compared with the origin's checksum.
Files have the permissions that they have in the origin, never more.

A set is known by the checksum of its paceline.json, so one of that name that was packed anew is
another. Shards come one by one under their names, each compared with its checksum; a set is read
from here as far as it is here (``Shards``), and from where it was packed for the rest. So training
may begin while it comes, and a kill leaves nothing half trusted. One process at a time stages to
such a folder: the next one waits, and finds what was done.
"""

import errno
import fcntl
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...record.ring.launcher_messages import notify
from ...security.files import UnsafeFileError
from ...security.folders import Folder, own_group
from ...security.text import printable
from ..format import shard_format
from ..format.shard_format import DataError, DatasetMeta, Shard
from .fetch_shards import Bringing, Staged, Step, whole
from .free_space import free
from .origin import Origin, check_entered
from .peer_transfer import UNCHECKED, Exchange, GoneError, join

PLACE, VARIABLE = "paceline-stage", "PACELINE_STAGE"
SETS = "PACELINE_STAGE_SETS"  # that ``paceline run --stage`` names
LOCK = ".lock"
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
    shared: bool = False,
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

    shared: for the group that owns ``source``, which its files must be readable for; a member's
    sets may make room for another's.

    Raises ValueError for a source that is no whole set, a root that can't be written to, a source
    that may not be shared, and a disk that fills up meanwhile; DataError where a shard is not what
    was packed.
    """
    began, path = time.monotonic(), Path(source)
    meta = shard_format.load_meta(path)
    files, origin = _files(path, meta), Origin(path, shared)
    if shared:
        _may_share(origin, files, Path(root))
    group = origin.group
    found = Staged(place(path, Path(root), group), len(meta.shards), socket.gethostname())
    tell = step or (lambda done, size: None)
    exchange: Exchange | None = None
    folder: Folder | None = None
    try:
        try:
            with _told(Path(root)):
                folder = open_set(path, Path(root), group, make=True)
            exchange = _joined(folder, files, found) if together else None
            _brought(origin, folder, files, room, threads, tell, waits, exchange, found)
        except ValueError as mistake:
            if exchange is None and together:
                exchange = _joined(folder, files, found)  # the others hear of it
            if exchange is None:
                raise
            found.error = str(mistake)
        found.left = [one.file for one in meta.shards if folder is None or not whole(folder, one)]
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
        if folder is not None:
            folder.close()
    return found


def _brought(
    origin: Origin,
    folder: Folder,
    files: list[Shard],
    room: int | None,
    threads: int,
    tell: Step,
    waits: Callable[[], None] | None,
    exchange: Exchange | None,
    found: Staged,
) -> None:
    root = folder.path.parent
    with _told(root), Folder.open(root, folder.group) as own, _alone(own, waits):
        if not _same(own, folder):  # another process made room while this one waited
            with own.subfolder(folder.path.name, make=True) as again:
                os.dup2(again.fd, folder.fd, inheritable=False)
        touch(folder)
        missing = [one for one in files if not whole(folder, one)]
        budget = _made_room(missing, origin, own, folder, room, found)
        try:
            Bringing(origin, folder, files, budget, exchange, found).run(threads, tell)
        finally:
            for name in folder.names():
                if name.startswith(".") and name.endswith(".part"):
                    folder.remove(name)


def _same(own: Folder, folder: Folder) -> bool:
    """Whether a set's folder is still the one of its name."""
    status, opened = own.status(folder.path.name), os.fstat(folder.fd)
    return status is not None and os.path.samestat(status, opened)


def _may_share(origin: Origin, files: list[Shard], root: Path) -> None:
    """Raises ValueError where members of the group can't read all of a set where it lies, can't
    enter the folder that it is staged to, or where a file has no checksum to be compared with."""
    for name in (shard_format.META_FILE, *(one.file for one in files)):
        try:
            os.close(origin.open(name))
        except OSError as error:
            raise ValueError(
                f"--shared: {origin.path / name} {error.strerror}. HINT: without --shared"
            ) from None
    if any(one.crc == UNCHECKED for one in files):
        raise ValueError(
            f"--shared: {origin.path} has no checksum of its index: it was packed by an older "
            "Paceline. HINT: without --shared, or pack it again"
        )
    if not root.is_dir():
        raise ValueError(
            f"--shared: there is no folder {root}. HINT: make it, open to group {origin.group}"
        )
    for folder in (root.resolve(), *root.resolve().parents):
        assert origin.group is not None
        check_entered(folder, origin.group, f"HINT: chmod g+x, or another ROOT than {root}")


def _files(origin: Path, meta: DatasetMeta) -> list[Shard]:
    """All of a set but for paceline.json: what has no samples first, as it is small. Sets of an
    older Paceline have no checksums of these files."""
    names = [shard_format.INDEX_FILE, *([shard_format.NAMES_FILE] if meta.names else [])]
    small = []
    for name in names:
        said = meta.files.get(name)
        size = (origin / name).stat().st_size if said is None else said.bytes
        small.append(Shard(name, 0, size, UNCHECKED if said is None else said.crc))
    return [*small, *meta.shards]


def _joined(folder: Folder | None, files: list[Shard], found: Staged) -> Exchange | None:
    try:
        return join(found.folder.name, folder, files, os.environ)
    except GoneError as error:
        why = str(error).splitlines()[0] if str(error) else "no answer"
        found.notes.append(f"the job's store does not answer ({why}): {found.host} reads all alone")
        return None


def _plain(found: Staged) -> dict[str, Any]:
    return asdict(found) | {"folder": str(found.folder), "hosts": []}


def place(origin: Path, root: Path, group: int | None = None) -> Path:
    """Return the folder where a set is, or would be: this user's, or a group's."""
    told = shard_format.read_meta_checksum(origin)
    whose = f"{os.geteuid()}" if group is None else f"group-{group}"
    return root / f"{PLACE}-{whose}" / f"{origin.resolve().name}-{told}"


def open_set(origin: Path, root: Path, group: int | None = None, make: bool = False) -> Folder:
    """Open the folder of a staged set. make: it and what leads to it may be new.

    Raises UnsafeFileError where the folder is not this user's, or the group's; OSError.
    """
    path = place(origin, root, group)
    if make:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root)) from None
        Folder.make(path.parent, group, exist_ok=True).close()
    with Folder.open(path.parent, group) as own:
        return own.subfolder(path.name, make)


def touch(folder: Folder) -> None:
    """Note that a set is used now. Raises OSError."""
    fd = _opened(folder, USED)
    try:
        os.utime(fd)
    finally:
        os.close(fd)


def _opened(folder: Folder, name: str) -> int:
    """Open a file that all who may write to the folder can write to; it may be new."""
    if folder.group is not None and folder.status(name) is None:
        folder.make_file(name, 0o660)
    return folder.open_file(name, os.O_RDWR | os.O_CREAT)


def begin_all() -> None:
    """At a rank's start: what ``paceline run --stage`` names comes before the script asks for it,
    on all hosts."""
    root = os.environ.get(VARIABLE)
    for one in filter(None, os.environ.get(SETS, "").split(os.pathsep)):
        try:
            begin(Path(one), Path(root or ""))
        except (OSError, ValueError):  # the script says so, if it opens it
            continue


def here(origin: Path) -> Folder | None:
    """Open the set's folder on this host, if some of it was staged to $PACELINE_STAGE: by this
    user, or by a member of the group that owns the set."""
    root = os.environ.get(VARIABLE)
    if not root:
        return None
    begin(origin, Path(root))
    group = origin.stat().st_gid
    for whose in (None, group) if own_group(group) else (None,):
        try:
            folder = open_set(origin, Path(root), whose)
            with suppress(OSError):  # a disk that can only be read, say
                touch(folder)
            return folder
        except UnsafeFileError as error:
            if error.filename not in _refused:
                _refused.add(error.filename)
                why = f"{printable(str(error.filename))} {error.strerror}"
                notify(f"paceline: {why}: it is not read, and {origin} is read where it lies\n")
        except OSError:
            continue
    return None


_refused: set[str] = set()  # folders that are not this user's or a group's, named once
_begun: dict[Path, "subprocess.Popen[bytes]"] = {}  # by this process


def begin(origin: Path, root: Path) -> None:
    """Of a set that ``paceline run --stage`` names: the first rank of each host has it staged
    beside the training, by a process that ends with it."""
    if str(origin.resolve()) not in os.environ.get(SETS, "").split(os.pathsep):
        return
    folder = place(origin, root)
    try:
        open_set(origin, root, make=True).close()  # all ranks look here for what comes
    except OSError:  # staging says so
        pass
    first = os.environ.get("LOCAL_RANK", "0") == "0" and multiprocessing.parent_process() is None
    if first and folder not in _begun:
        words = [sys.executable, "-m", "paceline", "stage", "--beside", str(origin)]
        quiet = subprocess.DEVNULL
        _begun[folder] = subprocess.Popen(words, stdin=quiet, stdout=quiet)


def _made_room(
    missing: list[Shard],
    origin: Origin,
    own: Folder,
    folder: Folder,
    room: int | None,
    found: Staged,
) -> int:
    """Bytes that may come: other sets go until what is missing fits, the longest unused first."""
    meta = shard_format.META_FILE
    beside = 0 if folder.status(meta) is not None else (origin.path / meta).stat().st_size
    wanted = sum(one.bytes for one in missing) + beside
    sets = dict(_sets(own))
    used = {name: at for name, (_, at) in sets.items() if at is not None}
    used.pop(folder.path.name, None)
    others = sorted(used, key=lambda name: used[name])
    while True:
        left = free(own.path)
        if room is not None:
            left = min(left, room - sum(size for size, _ in sets.values()))
        if wanted <= left or not others:
            return left - beside
        gone = others.pop(0)
        try:
            own.remove(gone)  # who reads it has it open, or goes to the source
        except OSError as error:
            found.notes.append(f"{own.path / gone} can't make room: {error.strerror}")
            continue
        del sets[gone]
        found.evicted.append(gone)


def _sets(own: Folder) -> Iterator[tuple[str, tuple[int, float | None]]]:
    """Of each set that is staged there: its name, its bytes, and when it was used last."""
    for name in own.names():
        try:
            with own.subfolder(name) as folder:
                all_of_it = [folder.status(one) for one in folder.names()]
                size = sum(one.st_size for one in all_of_it if one is not None)
                used = folder.status(USED)
                yield name, (size, None if used is None else used.st_mtime)
        except OSError:  # no folder, or removed meanwhile
            continue


@contextmanager
def _alone(own: Folder, waits: Callable[[], None] | None) -> Iterator[None]:
    """While no other process stages to the same folder; the lock ends with this one."""
    lock = _opened(own, LOCK)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waits is not None:
                waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


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
        elif isinstance(error, UnsafeFileError):
            way = "HINT: choose another ROOT, or have that folder removed by its owner"
        where = error.filename or root
        raise ValueError(f"{where}: {error.strerror or error}. {way}") from error
