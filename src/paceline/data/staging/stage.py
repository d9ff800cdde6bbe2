"""``paceline stage``: copy the shards of a packed dataset to node-local storage.

    ROOT/paceline-stage-USER/NAME-CHECKSUM/shard-00000.bin   complete, or missing
                                          /.*.part           being copied
                                          /paceline.json     metadata of the dataset

Only this user can access the folder (security.folders; USER is the user ID). For a dataset that is
shared with a group the folder is ROOT/paceline-stage-group-GROUP, made and read by the members of
the group that owns the dataset. Then the index is always the one of the origin, so that each sample
is compared with the origin's checksum. Files have the permissions that they have at the origin,
never more.

A dataset is identified by the checksum of its paceline.json, so a dataset that was packed again
under the same name is a different one. Shards get their names one by one, each after its checksum
was verified. Reading uses the staged shards, and the origin for the others (``Shards``). Training
may therefore begin during staging, and a killed process leaves no file that is trusted although it
is incomplete. One process at a time stages to such a folder: the next one waits, and then finds the
staged files.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...cluster.topology.local_resources import IN_MEMORY, file_system_type, free_memory
from ...security.files import UnsafeFileError
from ...security.folders import Folder
from ..format import shard_format
from ..format.meta_schema import DatasetMeta, Shard
from ..format.shard_format import DataError
from .fetch_shards import ShardFetcher, Staged, Step, whole
from .origin import Origin, check_entered
from .peer_transfer import PeerTransfer, StoreLostError, join_peer_transfer
from .shard_server import NO_CHECKSUM
from .staged_sets import LAST_USED, open_or_create, open_staged, staged_path, touch

LOCK = ".lock"
KEPT_SHARE = 0.1  # of the free space that stays free
THREADS = 2  # one computes a checksum while the other reads


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
    """Copy the packed dataset ``source`` to the folder ``root``.

    Args:
        source: Folder of the packed dataset.
        root: Folder on node-local storage.
        room: Maximum number of bytes of all staged datasets together. Default: 90 % of the free
            space (in memory: of what the job may still use). Datasets that have not been used for
            the longest time are removed to make room. Shards without room are read from
            ``source``.
        threads: Number of threads that read from ``source``.
        step: Called several times a second with the number of copied shards and of bytes.
        waits: Called if another process has to end first.
        together: Stage together with the other nodes of the job that the environment variables of
            this process describe; each node calls this function once. Every byte is read once
            from ``source``, and the other nodes fetch it from the node that has read it
            (peer_transfer.py). A node without room for all shards reads a part that no other node
            reads. The call returns when all nodes have finished. An error on one node is then
            returned in the result, and the other nodes continue.
        ended: Called when this node has finished.
        shared: Stage for the group that owns ``source``, which must be able to read its files. A
            member's datasets may be removed to make room for another member's.

    Raises:
        ValueError: ``source`` is not a complete dataset or may not be shared, ``root`` can't be
            written to, or the disk is full.
        DataError: A shard differs from what was packed.
    """
    began, path = time.monotonic(), Path(source)
    meta = shard_format.load_meta(path)
    files, origin = _files(path, meta), Origin(path, shared)
    if shared:
        _check_may_share(origin, files, Path(root))
    group = origin.group
    found = Staged(staged_path(path, Path(root), group), len(meta.shards), socket.gethostname())
    tell = step or (lambda done, size: None)
    exchange: PeerTransfer | None = None
    folder: Folder | None = None
    try:
        try:
            with _explain_errors(Path(root)):
                folder = open_staged(path, Path(root), group, make=True)
            exchange = _join_exchange(folder, files, found) if together else None
            _fetch_shards(origin, folder, files, room, threads, tell, waits, exchange, found)
        except ValueError as mistake:
            if exchange is None and together:
                # To publish the error to the other hosts.
                exchange = _join_exchange(folder, files, found)
            if exchange is None:
                raise
            found.error = str(mistake)
        found.left = [
            shard.file for shard in meta.shards if folder is None or not whole(folder, shard)
        ]
        found.here = found.shards - len(found.left)
        found.seconds = time.monotonic() - began
        if ended is not None:
            ended(found)
        if exchange is not None:
            exchange.end(_as_json(found))
            found.hosts = exchange.linger(lambda: tell(found.copied, found.bytes))
    except BaseException as error:
        if exchange is not None:  # so that no other host waits for this one
            exchange.end(_as_json(found) | {"error": found.error or type(error).__name__})
        raise
    finally:
        if exchange is not None:
            exchange.close()
        if folder is not None:
            folder.close()
    return found


def _fetch_shards(
    origin: Origin,
    folder: Folder,
    files: list[Shard],
    room: int | None,
    threads: int,
    tell: Step,
    waits: Callable[[], None] | None,
    exchange: PeerTransfer | None,
    found: Staged,
) -> None:
    root = folder.path.parent
    with _explain_errors(root), Folder.open(root, folder.group) as own, _exclusive(own, waits):
        if not _still_has_its_name(own, folder):  # removed by another process to make room
            with own.subfolder(folder.path.name, make=True) as again:
                os.dup2(again.fd, folder.fd, inheritable=False)
        touch(folder)
        missing = [file for file in files if not whole(folder, file)]
        budget = _make_room(missing, origin, own, folder, room, found)
        try:
            ShardFetcher(origin, folder, files, budget, exchange, found).run(threads, tell)
        finally:
            for name in folder.names():
                if name.startswith(".") and name.endswith(".part"):
                    folder.remove(name)


def _still_has_its_name(own: Folder, folder: Folder) -> bool:
    """Whether an open dataset folder still has its name."""
    status, opened = own.status(folder.path.name), os.fstat(folder.fd)
    return status is not None and os.path.samestat(status, opened)


def _check_may_share(origin: Origin, files: list[Shard], root: Path) -> None:
    """Check that a dataset may be shared with its group.

    Raises:
        ValueError: Members of the group can't read all files of the dataset at the origin, can't
            enter the folder that it is staged to, or a file has no checksum to compare with.
    """
    for name in (shard_format.META_FILE, *(file.file for file in files)):
        try:
            os.close(origin.open(name))
        except OSError as error:
            raise ValueError(
                f"--shared: {origin.path / name} {error.strerror}. HINT: leave out --shared"
            ) from None
    if any(file.crc == NO_CHECKSUM for file in files):
        raise ValueError(
            f"--shared: {origin.path} has no checksum of its index: an older Paceline packed it. "
            "HINT: pack it again, or leave out --shared"
        )
    if not root.is_dir():
        raise ValueError(
            f"--shared: the folder {root} does not exist. HINT: create it with access for group "
            f"{origin.group}"
        )
    for folder in (root.resolve(), *root.resolve().parents):
        assert origin.group is not None
        check_entered(folder, origin.group, f"HINT: chmod g+x, or choose a ROOT other than {root}")


def _files(origin: Path, meta: DatasetMeta) -> list[Shard]:
    """Return all files of a dataset except paceline.json.

    Files without samples come first, as they are small. Datasets that an older Paceline packed have
    no checksums of these files.
    """
    names = [shard_format.INDEX_FILE, *([shard_format.NAMES_FILE] if meta.names else [])]
    small = []
    for name in names:
        packed = meta.files.get(name)
        size = (origin / name).stat().st_size if packed is None else packed.bytes
        small.append(Shard(name, 0, size, NO_CHECKSUM if packed is None else packed.crc))
    return [*small, *meta.shards]


def _join_exchange(folder: Folder | None, files: list[Shard], found: Staged) -> PeerTransfer | None:
    try:
        return join_peer_transfer(found.folder.name, folder, files, os.environ)
    except StoreLostError as error:
        why = str(error).splitlines()[0] if str(error) else "no answer"
        found.notes.append(
            f"the job's store does not answer ({why}): {found.host} reads all shards from the "
            "origin"
        )
        return None


def _as_json(found: Staged) -> dict[str, Any]:
    return asdict(found) | {"folder": str(found.folder), "hosts": []}


def _make_room(
    missing: list[Shard],
    origin: Origin,
    own: Folder,
    folder: Folder,
    room: int | None,
    found: Staged,
) -> int:
    """Return the number of bytes that may be transferred.

    Other datasets are removed until the missing files fit, the longest unused first.
    """
    meta = shard_format.META_FILE
    beside = 0 if folder.status(meta) is not None else (origin.path / meta).stat().st_size
    wanted = sum(file.bytes for file in missing) + beside
    sets = dict(_staged_datasets(own))
    used = {name: at for name, (_, at) in sets.items() if at is not None}
    used.pop(folder.path.name, None)
    others = sorted(used, key=lambda name: used[name])
    while True:
        left = free_space(own.path)
        if room is not None:
            left = min(left, room - sum(size for size, _ in sets.values()))
        if wanted <= left or not others:
            return left - beside
        gone = others.pop(0)
        try:
            own.remove(gone)  # a reader has the files open, or falls back to the origin
        except OSError as error:
            found.notes.append(f"{own.path / gone} can't be removed to make room: {error.strerror}")
            continue
        del sets[gone]
        found.evicted.append(gone)


def free_space(folder: Path) -> int:
    """Return the bytes that may be written to a folder.

    Files in /dev/shm count as memory of the job, and a scheduler ends a job that uses more memory
    than it requested.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if file_system_type(folder) in IN_MEMORY:
        free = min(free, free_memory())
    return max(int((1 - KEPT_SHARE) * free), 0)


def _staged_datasets(own: Folder) -> Iterator[tuple[str, tuple[int, float | None]]]:
    """Yield the name of each staged dataset, its bytes, and when it was last used."""
    for name in own.names():
        try:
            with own.subfolder(name) as folder:
                all_of_it = [folder.status(file) for file in folder.names()]
                size = sum(status.st_size for status in all_of_it if status is not None)
                used = folder.status(LAST_USED)
                yield name, (size, None if used is None else used.st_mtime)
        except OSError:  # not a folder, or removed meanwhile
            continue


@contextmanager
def _exclusive(own: Folder, waits: Callable[[], None] | None) -> Iterator[None]:
    """Hold the lock of a folder, so that no other process stages to it.

    The kernel releases the lock when this process ends.
    """
    lock = open_or_create(own, LOCK)
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
def _explain_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        way = "HINT: choose a folder of this host that you can write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            way = "Complete shards are kept. HINT: make room, or limit the copy with --room"
        elif isinstance(error, UnsafeFileError):
            way = "HINT: choose another ROOT, or ask the owner to remove that folder"
        where = error.filename or root
        raise ValueError(f"{where}: {error.strerror or error}. {way}") from error
