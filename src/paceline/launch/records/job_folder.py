"""Keep a run's record: from node-local memory to the folder that the user named.

The promise lies in the job's folder, so that whoever is left at the end can fulfil it: the rank
server, the launcher after it, or the next ``paceline run`` on this host. A job's folder is this
user's alone (``security.folders``); what lies under its name and is another user's is left alone,
and said once. Nothing that a file says is ever removed.
"""

import fcntl
import json
import os
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from ...security.files import InvalidFileError, read_regular
from ...security.folders import Folder, can_be_renamed_by_others, replace_file
from ...security.schema import read_json
from ...security.text import printable
from .copy_records import copy_records

PROMISE = "keep.json"
ATTEMPT = "attempt"
ABOUT = "run.json"
LOCK = "lock"
TO_SEND = "to-send"  # subfolder: the records that the agent sends to the launcher's host
NEW_S = 60.0  # age of a folder that nobody is still making
MAX_NAMED = 8  # of other users' folders
FAILED = "failed"  # the record could not be kept, which was said
MAX_ABOUT_BYTES = 16 << 20  # a command line may be long


@dataclass
class Promise:
    """Where a job's records go. target: folder on this host; sent: they are sent to the
    launcher's host by the agent instead."""

    target: str = ""
    sent: bool = False


@dataclass
class About:
    """Whose records a folder holds. started: seconds since 1970."""

    run: str = ""
    command: list[str] = field(default_factory=list)
    started: Annotated[float, Meta(ge=0, le=1e11)] | None = None
    host: str = ""


def check(target: Path) -> None:
    """Raises ValueError where ``target`` has a record already, or can't be written."""
    if target.is_dir() and any(target.rglob("*.ring")):
        raise ValueError(f"{target}: there is a record already. HINT: another folder, or remove it")
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target):
            pass
    except OSError as error:
        raise ValueError(
            f"{target}: {error.strerror}. HINT: a folder that can be written"
        ) from None


def job_folder() -> Path:
    """Make a folder in node-local memory for a job's records, this user's alone.

    Its lock lives as long as any process of the job. Folders whose lock is free are of jobs
    that were killed altogether: what they promised is done here, and they are removed.
    """
    rescue()
    name = secrets.token_hex(8)
    for place in _PLACES:
        try:
            if can_be_renamed_by_others(place):
                continue
            folder = Folder.make(place / (_new_prefix() + name))  # not yet one that others clear
        except OSError:
            continue
        with folder:
            _lock(folder)
            folder.move(place / (_prefix() + name))
            return folder.path
    raise ValueError(
        f"no folder for a job's records: neither {' nor '.join(map(str, _PLACES))} can be written "
        "to by you and is safe from other users. HINT: TMPDIR=DIR, a folder of your own or one "
        "with the sticky bit (chmod 1777)"
    )


def rescue() -> None:
    """Clear the folders of jobs that were killed together with all that would have done it."""
    for folder in _job_folders():
        with folder:
            lock = _lock(folder)
            if lock is not None:
                clear(folder.path, orphan=True)
                os.close(lock)  # one that could not be cleared is no running job
    for folder in _folders(_new_prefix()):  # of processes that were killed as they made them
        with folder:
            old = time.time() - os.fstat(folder.fd).st_mtime > NEW_S
            lock = _lock(folder) if old else None
            if lock is not None:
                folder.remove_all(last=LOCK)
                os.close(lock)


_PLACES = (Path("/dev/shm"), Path(tempfile.gettempdir()))
_reported: set[str] = set()  # folders that are not this user's, named once


def _prefix() -> str:
    return f"paceline-job-{os.getuid()}-"


def _new_prefix() -> str:
    return f"paceline-new-{os.getuid()}-"


def _job_folders() -> Iterator[Folder]:
    """Open this user's job folders."""
    return _folders(_prefix())


def _folders(prefix: str) -> Iterator[Folder]:
    """Open this user's folders of such names. What has such a name and is none is named once."""
    name_of_one = re.compile(re.escape(prefix) + r"[0-9a-zA-Z_]+")
    for place in dict.fromkeys(_PLACES):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue
        for name in filter(name_of_one.fullmatch, names):
            try:
                yield Folder.open(place / name)
            except FileNotFoundError:
                continue  # just removed
            except OSError as error:
                if name not in _reported:
                    _reported.add(name)
                    _report(place / name, error)


def _report(path: Path, error: OSError) -> None:
    if len(_reported) <= MAX_NAMED:
        sys.stderr.write(
            f"paceline: {path} {error.strerror}: it is not one of your jobs, and is left alone\n"
        )
    elif len(_reported) == MAX_NAMED + 1:
        sys.stderr.write(f"paceline: and more of the kind in {path.parent}\n")


def _lock(folder: Folder) -> int | None:
    """Take the folder's lock. Return its descriptor, which holds it for as long as this process and
    its children live; None where another process has it."""
    try:
        fd = folder.open_file(LOCK, os.O_RDWR | os.O_CREAT)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def running() -> list[Path]:
    """Return the folders of this user's jobs that run on this host. Looking changes nothing."""
    found = []
    for folder in _job_folders():
        with folder:
            if _locked(folder):
                found.append(folder.path)
    return found


def _locked(folder: Folder) -> bool:
    """Whether somebody holds the folder's lock. It is shared for the moment of the question, so
    that another who asks is not told wrong; a rescue at that very moment is left to the next."""
    try:
        fd = folder.open_file(LOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def promise(folder: Path, target: Path, command: list[str], run: str) -> None:
    """Note in the job's folder where its records are to go."""
    label(target, command, run)
    introduce(folder, command, run)
    promise_to(folder, target)


def label(folder: Path, command: list[str], run: str) -> None:
    """Write into a folder whose records it holds. Raises OSError."""
    host = socket.gethostname()
    found = {"run": run, "command": command, "started": time.time(), "host": host}
    replace_file(folder / ABOUT, json.dumps(found, indent=1).encode())


def introduce(folder: Path, command: list[str], run: str) -> None:
    """``label`` a job's own folder, if there is room: only who looks at running jobs reads it."""
    try:
        label(folder, command, run)
    except OSError:
        pass


def about(folder: Path) -> About:
    """Return what ``label`` has written into a folder; empty where it has not."""
    try:
        return read_json(folder / ABOUT, About, MAX_ABOUT_BYTES)
    except (OSError, InvalidFileError):
        return About()


def promised(folder: Path) -> Path | None:
    """Return where the records in a job's folder are to go on this host, if anywhere."""
    try:
        found = read_json(folder / PROMISE, Promise, MAX_ABOUT_BYTES, escape=False)
    except (OSError, InvalidFileError):
        return None
    return Path(found.target) if found.target and not found.sent else None


def noted_attempt(folder: Path) -> int | None:
    """Return which attempt of the job began last; None where nobody notes that."""
    try:
        return int(read_regular(folder / ATTEMPT, 20))
    except (OSError, ValueError):
        return None


def promise_to(folder: Path, target: Path) -> None:
    """Have the records in ``folder`` go to ``target`` when it is cleared."""
    _promise(folder, {"target": str(target.absolute())})


def promise_to_send(folder: Path) -> None:
    """Have the records in ``folder`` wait in its subfolder TO_SEND when it is cleared, to be sent
    to another host by the process that it is cleared for."""
    _promise(folder, {"sent": True})


def _promise(folder: Path, found: dict[str, Any]) -> None:
    with Folder.open(folder) as opened:
        opened.write(PROMISE, json.dumps(found).encode())


def note_attempt(folder: Path, number: int) -> None:
    """Attempt ``number`` begins: only its records are the run's."""
    try:
        with Folder.open(folder) as opened:
            opened.write(ATTEMPT, str(number).encode())
    except OSError:
        pass  # the records themselves say it too, nearly always


def clear(folder: Path, orphan: bool = False) -> bool:
    """Copy the records in the job's folder to where they were promised, and remove it; never
    raises. A folder whose promise can't be kept stays, and is named once.

    Args:
        orphan: Nobody is left who would send the records to another host; and a copy that has
            failed is tried again.

    Returns:
        Whether nothing was lost so far: all is copied, or waits to be sent.
    """
    try:
        opened = Folder.open(folder)
    except FileNotFoundError:
        return True  # removed meanwhile
    except OSError as error:
        sys.stderr.write(f"paceline: the record of this job is lost: {folder} {error.strerror}\n")
        return False
    with opened:
        if opened.status(PROMISE) is None:
            opened.remove_all(last=LOCK)
            return True
        if opened.status(FAILED) is not None and not orphan:
            return False
        try:
            found = read_json(PROMISE, Promise, MAX_ABOUT_BYTES, dir_fd=opened.fd, escape=False)
            if found.sent and orphan:
                sys.stderr.write("paceline: the records of this host are lost with its agent\n")
            elif found.sent:
                _set_aside(opened)
                return True
            else:
                target = Path(found.target)
                target.mkdir(parents=True, exist_ok=True)  # the script may have removed it
                copy_records(opened, target, noted_attempt(folder))
        except Exception as error:
            _failed(opened, error)
            return False
        opened.remove_all(last=LOCK)
        return True


def remove(folder: Path) -> None:
    """Remove a job's folder, whatever it holds; never raises."""
    try:
        with Folder.open(folder) as opened:
            opened.remove_all(last=LOCK)
    except OSError:
        pass


def _failed(folder: Folder, error: Exception) -> None:
    sys.stderr.write(
        f"paceline: the record could not be kept ({printable(str(error))}). It is in "
        f"{folder.path}; the next paceline run on this host tries again. HINT: make room there, or "
        f"cp {folder.path}/*.ring to another folder\n"
    )
    try:
        os.close(folder.open_file(FAILED, os.O_WRONLY | os.O_CREAT))
    except OSError:
        pass  # it is said once more


def _set_aside(folder: Folder) -> None:
    """Copy the records to TO_SEND, and remove the rings: they may be large."""
    if folder.status(TO_SEND) is not None:
        return
    part = f"{TO_SEND}.part"
    folder.remove(part)
    with folder.subfolder(part, make=True) as waiting:
        copy_records(folder, waiting.path, noted_attempt(folder.path))
    folder.rename(part, TO_SEND)
    for name in folder.names():
        if name.endswith((".ring", ".lines", ".stack")):
            folder.remove(name)
