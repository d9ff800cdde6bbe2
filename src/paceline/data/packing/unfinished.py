"""The work folder DEST/.packing of an unfinished dataset.

It holds what is needed to continue, and is locked for one process and the ranks that it starts. A
mark in it proves that Paceline has created it, and with it the unfinished files in DEST.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...security.files import InvalidFileError, open_regular
from ...security.folders import open_folder, remove_content, remove_entry
from ...security.removal import (
    MARK,
    REMOVED_PREFIX,
    check_mark,
    has_mark,
    remove_from_marked,
    write_mark,
)
from ...security.schema import read_json
from ...security.text import printable_tree
from ..format import shard_format
from ..format.meta_schema import SHARD_NAME
from ..format.shard_format import write_atomically

WORK_FOLDER, PLAN_FILE, SPOOL_FOLDER, LOCK_FILE = ".packing", "plan.json", "spool", "lock"
KIND = "unfinished dataset"  # of the mark
MAX_PLAN_BYTES = 1 << 20
RUN_PREFIX, PIECE_PREFIX = "run-", "piece-"  # of folders in it: a job of ranks, a complete piece


@contextmanager
def open_work_folder(folder: Path, plan: dict[str, Any], fresh: bool) -> Iterator[Path]:
    """Yield the locked work folder; remove it at the end.

    It is kept after an error if a later call can continue from it. Raises ValueError if ``folder``
    holds a dataset, or files of others with the names of a dataset's, is being packed by another
    process, or was begun with another ``plan``.
    """
    work, owner, plan = folder / WORK_FOLDER, os.getpid(), printable_tree(plan)
    if (folder / shard_format.META_FILE).exists() and not fresh:
        raise ValueError(
            f"{folder} contains a packed dataset. HINT: choose another folder, or replace the "
            "dataset: fresh=True (--fresh)"
        )
    with _locked(folder, work) as opened:
        earlier_plan = _prepare(folder, work, opened, fresh)
        different = sorted(
            name for name in plan if earlier_plan and plan[name] != earlier_plan.get(name)
        )
        if different:
            raise ValueError(
                f"{folder} contains the unfinished dataset of an earlier call with other values "
                f"of {', '.join(different)}. HINT: use the values of that call, or discard its "
                "dataset: fresh=True (--fresh)"
            )
        try:
            with report_disk_errors(folder):
                write_atomically(work / PLAN_FILE, json.dumps(plan).encode())
            yield work
        except BaseException:
            # Mostly a user error before anything was packed: remove the folder. The exception also
            # passes through here in the rank server, a fork of this process, which must not.
            if os.getpid() == owner and not has_progress(work):
                with suppress(OSError):
                    _clear(folder, opened)
                _remove(work, opened)
            raise
        _remove(work, opened)


def _remove(work: Path, opened: int) -> None:
    remove_content(opened, last=MARK)
    with suppress(OSError):
        work.rmdir()


@contextmanager
def _locked(folder: Path, work: Path) -> Iterator[int]:
    """Create and lock the work folder, which may not be a link, and yield its open descriptor."""
    opened = lock = -1
    try:
        try:
            work.mkdir(parents=True, exist_ok=True)
            opened = open_folder(work)
            is_new = not set(os.listdir(opened)) - {LOCK_FILE}
            if not is_new:
                check_mark(opened, work, KIND)
            flags = os.O_RDWR | os.O_CREAT
            lock = open_regular(LOCK_FILE, flags, dir_fd=opened, follow_links=False, mode=0o666)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else error
            raise ValueError(
                f"{folder}: {reason}. HINT: choose a folder that you can write to"
            ) from None
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{folder} is being packed by another process. HINT: wait for it, or choose "
                "another folder"
            ) from None
        yield opened
    finally:
        for descriptor in (opened, lock):
            if descriptor >= 0:
                os.close(descriptor)


def _prepare(folder: Path, work: Path, opened: int, fresh: bool) -> dict[str, Any]:
    """Remove what no call can continue from. Return the plan of what is kept, {} if nothing is."""
    try:
        if not has_mark(opened, KIND):  # no call has begun here before
            replaces = fresh and (folder / shard_format.META_FILE).exists()
            if not replaces and (others := _written(folder)):
                raise ValueError(
                    f"{folder} contains {others[0].name}, which is not of a packed dataset, and "
                    "which paceline pack would replace. HINT: choose another folder"
                )
            write_mark(opened, KIND)
        # Folders of a job that was killed.
        for leftover in (*work.glob(f"{RUN_PREFIX}*"), *work.glob(f"{REMOVED_PREFIX}*")):
            discard(leftover)
        if fresh or not has_progress(work):
            _clear(folder, opened)
        return _plan(work)
    except InvalidFileError as error:
        raise ValueError(
            f"{error}. The unfinished dataset of an earlier call can't be continued. HINT: discard "
            "it: fresh=True (--fresh)"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: {error.strerror or error}. HINT: remove {work}, and "
            "pack again"
        ) from None


def has_progress(work: Path) -> bool:
    """Return whether a later call can continue from the work folder."""
    whole = any(work.glob("shard-*.json")) or any(work.glob(f"{PIECE_PREFIX}*"))
    return whole or (work / SPOOL_FOLDER / shard_format.META_FILE).exists()


def discard(folder: Path) -> None:
    """Remove a folder in the work folder, to which ranks of a killed job may still write."""
    with suppress(OSError):
        remove_from_marked(folder, KIND)


def _plan(work: Path) -> dict[str, Any]:
    """Return the plan of an earlier call. Raises InvalidFileError if it is damaged."""
    try:
        found: dict[str, Any] = read_json(work / PLAN_FILE, dict[str, Any], MAX_PLAN_BYTES)
    except FileNotFoundError:
        return {}
    return found


def _written(folder: Path) -> list[Path]:
    """Return the files in ``folder`` with names of a dataset's, except its description."""
    shards = (path for path in folder.glob("shard-*.bin") if SHARD_NAME.fullmatch(path.name))
    lists = (folder / shard_format.INDEX_FILE, folder / shard_format.NAMES_FILE)
    return [*sorted(shards), *(path for path in lists if os.path.lexists(path))]


def _clear(folder: Path, opened: int) -> None:
    """Remove all files that Paceline has written, and no others. ``opened``: the work folder."""
    for path in (folder / shard_format.META_FILE, *_written(folder)):
        path.unlink(missing_ok=True)
    for name in os.listdir(opened):
        if name not in (LOCK_FILE, MARK):
            remove_entry(name, opened)


@contextmanager
def report_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        action = "make room, and " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ValueError(
            f"{error.filename or folder}: {error.strerror or error}. Complete shards are "
            f"kept. HINT: {action}repeat the same command, which continues"
        ) from error
