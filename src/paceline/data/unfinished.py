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
from typing import Any

from . import shard_format

WORK, PLAN, SPOOL = ".packing", "plan.json", "spool"
RUN, PIECE, GONE = "run-", "piece-", "gone-"  # names below: of a job of ranks, of a whole piece


@contextmanager
def working(folder: Path, plan: dict[str, Any], fresh: bool) -> Iterator[Path]:
    """The folder of what is not whole yet, this process's alone."""
    work, owner = folder / WORK, os.getpid()
    if (folder / shard_format.META).exists() and not fresh:
        raise ValueError(
            f"{folder}: holds a packed set. HINT: another folder, or fresh=True (--fresh), which "
            "packs it anew"
        )
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("a")
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}. HINT: a folder to write to") from None
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{folder}: is being packed by another process. HINT: wait for it, or take "
                "another folder"
            ) from None
        for left in (*work.glob(f"{RUN}*"), *work.glob(f"{GONE}*")):  # of a job that was killed
            discard(left)
        if fresh or not kept(work):
            _cleared(folder, work)
        before = _plan(work)
        odd = sorted(name for name in plan if before and plan[name] != before.get(name))
        if odd:
            raise ValueError(
                f"{folder}: holds what an earlier call has packed so far, with other "
                f"{', '.join(odd)}. HINT: the same as then, or fresh=True (--fresh)"
            )
        (work / PLAN).write_text(json.dumps(plan))
        try:
            yield work
        except BaseException:
            # A mistake, mostly: nothing of it is left. A process that was forked from this one to
            # be the ranks' server comes by here, too.
            if os.getpid() == owner and not kept(work):
                shutil.rmtree(work, ignore_errors=True)
            raise
    shutil.rmtree(work, ignore_errors=True)


def kept(work: Path) -> bool:
    """Whether there is something that a call can go on with."""
    whole = any(work.glob("shard-*.json")) or any(work.glob(f"{PIECE}*"))
    return whole or (work / SPOOL / shard_format.META).exists()


def discard(folder: Path) -> None:
    """Remove a folder that ranks of a job that was killed may still be writing to: under its name
    it is gone at once, and they fail."""
    gone = folder.with_name(f"{GONE}{folder.name}")
    try:
        folder.rename(gone)
    except OSError:
        gone = folder
    shutil.rmtree(gone, ignore_errors=True)


def _plan(work: Path) -> Any:
    try:
        return json.loads((work / PLAN).read_text())
    except (OSError, ValueError):
        return None


def _cleared(folder: Path, work: Path) -> None:
    """Of what Paceline has written, nothing is left; of other files, all."""
    ours: Iterable[Path] = (*folder.glob("shard-[0-9]*.bin"), folder / shard_format.INDEX)
    for path in (folder / shard_format.META, *ours, folder / shard_format.NAMES):
        path.unlink(missing_ok=True)
    for path in work.iterdir():
        if path.name != "lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


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
