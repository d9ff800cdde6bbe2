"""A set that is not whole yet: the folder of what is needed to go on with it, DEST/.packing, which
is one process's alone (and of the ranks that it starts)."""

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

WORK, PLAN, SPOOL = ".packing", "plan.json", "spool"
MAX_PLAN_BYTES = 1 << 20
RUN, PIECE, GONE = "run-", "piece-", "gone-"  # names below: of a job of ranks, of a whole piece


@contextmanager
def working(folder: Path, plan: dict[str, Any], fresh: bool) -> Iterator[Path]:
    """The folder of what is not whole yet, this process's alone."""
    work, owner, plan = folder / WORK, os.getpid(), printable_tree(plan)
    if (folder / shard_format.META_FILE).exists() and not fresh:
        raise ValueError(
            f"{folder}: holds a packed set. HINT: another folder, or fresh=True (--fresh), which "
            "packs it anew"
        )
    with _lock(folder, work) as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{folder}: is being packed by another process. HINT: wait for it, or take "
                "another folder"
            ) from None
        before = _prepared(folder, work, fresh)
        odd = sorted(name for name in plan if before and plan[name] != before.get(name))
        if odd:
            raise ValueError(
                f"{folder}: holds what an earlier call has packed so far, with other "
                f"{', '.join(odd)}. HINT: the same as then, or fresh=True (--fresh)"
            )
        try:
            with full_told(folder):
                write_atomically(work / PLAN, json.dumps(plan).encode())
            yield work
        except BaseException:
            # A mistake, mostly: nothing of it is left. A process that was forked from this one to
            # be the ranks' server comes by here, too.
            if os.getpid() == owner and not kept(work):
                shutil.rmtree(work, ignore_errors=True)
            raise
    shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _lock(folder: Path, work: Path) -> Iterator[BinaryIO]:
    """The open lock file of the working folder, which is made, and is no link to another place."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        if work.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{WORK} is a symbolic link", str(work))
        flags = os.O_RDWR | os.O_CREAT
        lock = open_regular(work / "lock", flags, follow_links=False, mode=0o666)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        raise ValueError(f"{folder}: {reason}. HINT: a folder to write to") from None
    with open(lock, "r+b", buffering=0) as file:
        yield file


def _prepared(folder: Path, work: Path, fresh: bool) -> dict[str, Any]:
    """Remove what no call can go on with, and return the plan of what is kept: {} of nothing."""
    try:
        for left in (*work.glob(f"{RUN}*"), *work.glob(f"{GONE}*")):  # of a job that was killed
            discard(left)
        if fresh or not kept(work):
            _cleared(folder, work)
        return _plan(work)
    except InvalidFileError as error:
        raise ValueError(
            f"{error}: what an earlier call has packed can't be gone on with. HINT: fresh=True "
            "(--fresh)"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: {error.strerror or error}. HINT: remove {work}, and "
            "pack again"
        ) from None


def kept(work: Path) -> bool:
    """Whether there is something that a call can go on with."""
    whole = any(work.glob("shard-*.json")) or any(work.glob(f"{PIECE}*"))
    return whole or (work / SPOOL / shard_format.META_FILE).exists()


def discard(folder: Path) -> None:
    """Remove a folder that ranks of a job that was killed may still be writing to: under its name
    it is gone at once, and they fail."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    gone = folder.with_name(f"{GONE}{folder.name}")
    try:
        folder.rename(gone)
    except OSError:
        gone = folder
    shutil.rmtree(gone, ignore_errors=True)


def _plan(work: Path) -> dict[str, Any]:
    """Return the plan of an earlier call. Raises InvalidFileError for a damaged one."""
    try:
        found: dict[str, Any] = read_json(work / PLAN, dict[str, Any], MAX_PLAN_BYTES)
    except FileNotFoundError:
        return {}
    return found


def _cleared(folder: Path, work: Path) -> None:
    """Of what Paceline has written, nothing is left; of other files, all."""
    shards = (one for one in folder.glob("shard-*.bin") if SHARD_NAME.fullmatch(one.name))
    ours: Iterable[Path] = (
        *shards,
        folder / shard_format.INDEX_FILE,
        folder / shard_format.NAMES_FILE,
    )
    for path in (folder / shard_format.META_FILE, *ours):
        path.unlink(missing_ok=True)
    for path in work.iterdir():
        if path.name != "lock":
            own_folder = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if own_folder else path.unlink()


@contextmanager
def full_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        room = "make room, and " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ValueError(
            f"{error.filename or folder}: {error.strerror or error}. What is packed so far is "
            f"kept. HINT: {room}say the same again, which goes on where it was"
        ) from error
