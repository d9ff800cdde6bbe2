"""The work folder DEST/.packing of an unfinished dataset.

It holds what is needed to continue, and is locked for one process and the ranks that it starts.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ...security.files import InvalidFileError, open_regular
from ...security.schema import read_json
from ...security.text import printable_tree
from ..format import shard_format
from ..format.meta_schema import SHARD_NAME
from ..format.shard_format import write_atomically

WORK_FOLDER, PLAN_FILE, SPOOL_FOLDER = ".packing", "plan.json", "spool"
MAX_PLAN_BYTES = 1 << 20
# Prefixes of folders in it: of a job of ranks, of a complete piece, and of those being removed.
RUN_PREFIX, PIECE_PREFIX, DISCARDED_PREFIX = "run-", "piece-", "gone-"


@contextmanager
def open_work_folder(folder: Path, plan: dict[str, Any], fresh: bool) -> Iterator[Path]:
    """Yield the locked work folder; remove it at the end.

    It is kept after an error if a later call can continue from it. Raises ValueError if ``folder``
    holds a dataset, is being packed by another process, or was begun with another ``plan``.
    """
    work, owner, plan = folder / WORK_FOLDER, os.getpid(), printable_tree(plan)
    if (folder / shard_format.META_FILE).exists() and not fresh:
        raise ValueError(
            f"{folder} contains a packed dataset. HINT: choose another folder, or replace the "
            "dataset: fresh=True (--fresh)"
        )
    with _lock(folder, work) as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{folder} is being packed by another process. HINT: wait for it, or choose "
                "another folder"
            ) from None
        earlier_plan = _prepare(folder, work, fresh)
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
                shutil.rmtree(work, ignore_errors=True)
            raise
    shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _lock(folder: Path, work: Path) -> Iterator[BinaryIO]:
    """Create the work folder, which may not be a symbolic link, and yield its open lock file."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        if work.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{WORK_FOLDER} is a symbolic link", str(work))
        flags = os.O_RDWR | os.O_CREAT
        lock = open_regular(work / "lock", flags, follow_links=False, mode=0o666)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        raise ValueError(
            f"{folder}: {reason}. HINT: choose a folder that you can write to"
        ) from None
    with open(lock, "r+b", buffering=0) as file:
        yield file


def _prepare(folder: Path, work: Path, fresh: bool) -> dict[str, Any]:
    """Remove what no call can continue from. Return the plan of what is kept, {} if nothing is."""
    try:
        # Folders of a job that was killed.
        for leftover in (
            *work.glob(f"{RUN_PREFIX}*"),
            *work.glob(f"{DISCARDED_PREFIX}*"),
        ):
            discard(leftover)
        if fresh or not has_progress(work):
            _clear(folder, work)
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
    """Remove a folder that ranks of a killed job may still write to.

    The folder is renamed first, so that their writes fail.
    """
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    discarded = folder.with_name(f"{DISCARDED_PREFIX}{folder.name}")
    try:
        folder.rename(discarded)
    except OSError:
        discarded = folder
    shutil.rmtree(discarded, ignore_errors=True)


def _plan(work: Path) -> dict[str, Any]:
    """Return the plan of an earlier call. Raises InvalidFileError if it is damaged."""
    try:
        found: dict[str, Any] = read_json(work / PLAN_FILE, dict[str, Any], MAX_PLAN_BYTES)
    except FileNotFoundError:
        return {}
    return found


def _clear(folder: Path, work: Path) -> None:
    """Remove all files that Paceline has written, and no others."""
    shards = (path for path in folder.glob("shard-*.bin") if SHARD_NAME.fullmatch(path.name))
    written: Iterable[Path] = (
        *shards,
        folder / shard_format.INDEX_FILE,
        folder / shard_format.NAMES_FILE,
    )
    for path in (folder / shard_format.META_FILE, *written):
        path.unlink(missing_ok=True)
    for path in work.iterdir():
        if path.name != "lock":
            is_folder = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if is_folder else path.unlink()


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
