"""Job folders in node-local memory, and the copying of their records to the user's record folder.

The job folder itself contains the destination of the records, so that any remaining process can
copy them at the end: the rank server, the launcher after it, or the next ``paceline run`` on this
host. Only this user can access a job folder (``security.folders``), and its lock file is the proof
that Paceline has created it (``security.removal``). Any other folder of that name is left unchanged
and reported once, except that of a running job of another version. Paceline never removes a path
that it has read from a file.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from ..record.ring.ring import SIDECAR_SUFFIXES
from ..record.ring.states import SAMPLER_STATES
from ..record.ring.tail import MAX_RECORD_BYTES
from ..security.files import InvalidFileError, read_regular
from ..security.folders import Folder, can_be_renamed_by_others, open_subfolder, replace_file
from ..security.removal import check_mark, write_mark
from ..security.run_lock import RunLock
from ..security.schema import read_json
from ..security.text import printable

DESTINATION_FILE = "keep.json"
ATTEMPT = "attempt"
LABEL_FILE = "run.json"
LOCK, KIND = "lock", "job"  # the mark of the folder, and its kind
TO_SEND = "to-send"  # subfolder: the records that the agent sends to the launcher's host
NEW_S = 60.0  # minimum age of an unfinished folder before it counts as abandoned
MAX_NAMED = 8  # folders of other users that are reported
FAILED = "failed"  # marker file: copying the record failed, and the failure was reported
MAX_LABEL_BYTES = 16 << 20  # a command line may be long


# Copy the records of a job folder to the record folder: one record per rank and attempt.


def copy_records(folder: Folder, target: Path, last_begun: int | None) -> None:
    """Copy the records of the last attempt to ``target``, those of earlier attempts to its
    subfolders ``attempt-N``.

    If the job continued without this node, ``target`` contains records of a later attempt. All
    records of this node then belong to earlier attempts.

    Args:
        folder: The job folder.
        target: The record folder.
        last_begun: Number of the attempt that began last on this node, or None if unknown.

    Raises:
        OSError, InvalidFileError: A record can't be read or written.
    """
    from ..analyze.records.read_record import parse_record, used_bytes

    found: dict[tuple[int, int], tuple[int, int, str, bytes]] = {}
    for name in folder.names():
        if not name.endswith(".ring"):
            continue
        path = folder.path / name
        try:
            data = folder.read(name, MAX_RECORD_BYTES)
        except OSError as error:
            sys.stderr.write(
                f"paceline: the record {printable(str(path))} was not copied: {error.strerror}\n"
            )
            continue
        try:
            record = parse_record(data, str(path))
            data = data[: used_bytes(data)]
        except ValueError as error:
            sys.stderr.write(
                f"paceline: {printable(str(error))}. Paceline copies the file unchanged\n"
            )
            replace_file(target / name, data)
            continue
        key = (int(record.meta.get("attempt", 0)), record.rank)
        events = _event_count(record)
        # A process that only started the ranks may have a record with the number of a rank. Then
        # the record with more events is that of the rank.
        if key not in found or events > found[key][0]:
            found[key] = (events, int(record.meta["size"]), name, data)
    sizes = {size for events, size, _, _ in found.values() if events}
    last = max([last_begun or 0, *(attempt for attempt, _ in found)])
    record_files = {target / f"rank-{rank}.ring" for rank in (0, *(rank for _, rank in found))}
    last = max([last, *map(_attempt, record_files)])
    for (attempt, rank), (events, size, name, data) in found.items():
        if not events and sizes and size not in sizes:
            continue
        place = target if attempt == last else target / f"attempt-{attempt}"
        inside = open_subfolder(place) if place != target else None
        try:
            path = place if inside is None else Path()
            replace_file(path / f"rank-{rank}.ring", data, dir_fd=inside)
            for suffix in SIDECAR_SUFFIXES:
                beside = name.removesuffix(".ring") + suffix
                if folder.status(beside) is not None:
                    content = folder.read(beside, MAX_RECORD_BYTES)
                    replace_file(path / f"rank-{rank}{suffix}", content, dir_fd=inside)
        finally:
            if inside is not None:
                os.close(inside)


def _attempt(path: Path) -> int:
    """Return the attempt number of a record file; 0 if it is missing or invalid."""
    from ..analyze.records.read_record import parse_record

    try:
        return int(parse_record(read_regular(path, MAX_RECORD_BYTES)).meta.get("attempt", 0))
    except (OSError, ValueError):
        return 0


def _event_count(record: Any) -> int:
    """Return the number of events, without those of the sampler (where the script was)."""
    return int(len(record.events) - record.count(*SAMPLER_STATES))


@dataclass
class Destination:
    """Destination of a job's records.

    Attributes:
        target: Folder on this host.
        sent: Whether the agent sends the records to the launcher's host instead.
    """

    target: str = ""
    sent: bool = False


@dataclass
class Label:
    """The job whose records a folder contains.

    Attributes:
        run: ID of the run.
        command: The script or module, and its arguments.
        started: Start time, in seconds since 1970.
        host: Name of the host on which the job was started.
        env: Values of --env, as reports repeat them in commands.
    """

    run: str = ""
    command: list[str] = field(default_factory=list)
    started: Annotated[float, Meta(ge=0, le=1e11)] | None = None
    host: str = ""
    env: list[str] = field(default_factory=list)


def check(target: Path) -> None:
    """Create the record folder ``target`` if necessary, and check that it can be used.

    Raises:
        ValueError: The folder already contains a record, or can't be written.
    """
    clear_orphans()  # a job that was killed may have a record for this folder
    if target.is_dir() and any(target.rglob("*.ring")):
        raise ValueError(
            f"{target} already contains a record. HINT: choose another folder, or remove this one"
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target):
            pass
    except OSError as error:
        raise ValueError(
            f"{target}: {error.strerror}. HINT: choose a folder that you can write to"
        ) from None


def lock_record(target: Path, run: str, of_this_process: bool = True) -> RunLock:
    """Keep other runs from recording into ``target`` until the lock is released.

    Args:
        run: ID of the run.
        of_this_process: Whether this process takes the lock. Otherwise another one of the run does,
            and this one only checks it.

    Raises:
        ValueError: Another run records into it, or the lock can't be written.
    """
    lock = RunLock(target, "record", run)
    try:
        if of_this_process:
            lock.acquire(lambda line: print(f"paceline: {line}", file=sys.stderr))
        elif run:
            lock.check()
    except OSError as error:
        raise ValueError(
            f"{target}: {error.strerror}. HINT: choose a folder that you can write to"
        ) from None
    return lock


def job_folder() -> Path:
    """Create a folder for a job's records in node-local memory, accessible to this user only.

    The folder's lock is held as long as any process of the job exists. A folder whose lock is
    free belongs to a job of which all processes were killed: its records are copied to their
    destination here, and the folder is removed.

    Raises:
        ValueError: No location can be written and is safe from other users.
    """
    clear_orphans()
    name = secrets.token_hex(8)
    for place in _PLACES:
        try:
            if can_be_renamed_by_others(place):
                continue
            # Not yet the final name: rescue() in other processes would clear an unlocked folder.
            folder = make(place / (_new_prefix() + name))
        except OSError:
            continue
        with folder:
            _lock(folder)
            folder.move(place / (_prefix() + name))
            return folder.path
    raise ValueError(
        f"no folder for a job's records: neither {' nor '.join(map(str, _PLACES))} can be written "
        "to by you and is safe from other users. HINT: set TMPDIR to a folder that only you can "
        "write to, or to one with the sticky bit (chmod 1777)"
    )


def make(path: Path) -> Folder:
    """Create a job folder, and mark it as Paceline's. Raises OSError."""
    folder = Folder.make(path)
    write_mark(folder.fd, KIND, LOCK)
    return folder


def clear_orphans() -> None:
    """Clear the folders of jobs of which all processes were killed, including those that would
    have cleared the folder.
    """
    for folder in _folders(_prefix()):
        with folder:
            lock = _lock(folder)
            if lock is not None:
                clear(folder.path, orphan=True)
                os.close(lock)  # a folder that could not be cleared must not count as a running job
    for folder in _folders(_new_prefix()):  # left by processes killed in job_folder()
        with folder:
            old = time.time() - os.fstat(folder.fd).st_mtime > NEW_S
            lock = _lock(folder) if old else None
            if lock is not None:
                folder.remove_all(last=LOCK)
                os.close(lock)


_PLACES = (Path("/dev/shm"), Path(tempfile.gettempdir()))
_reported: set[str] = set()  # folders of other users that were already reported


def _prefix() -> str:
    return f"paceline-job-{os.getuid()}-"


def _new_prefix() -> str:
    return f"paceline-new-{os.getuid()}-"


def _folders(prefix: str) -> Iterator[Folder]:
    """Open this user's folders with this name prefix. Anything else with such a name is reported
    once.
    """
    name_of_one = re.compile(re.escape(prefix) + r"[0-9a-zA-Z_]+")
    for place in dict.fromkeys(_PLACES):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue
        for name in filter(name_of_one.fullmatch, names):
            try:
                yield _open(place / name)
            except FileNotFoundError:
                continue  # just removed
            except OSError as error:
                if name not in _reported and not _is_of_running_job(place / name):
                    _reported.add(name)
                    _report(place / name, error)


def _open(path: Path) -> Folder:
    """Open a job folder.

    Raises:
        UnsafeFileError: It belongs to another user, or Paceline has not created it.
        OSError: It can't be opened. It counts as missing while it is empty: another process is just
            creating or removing it.
    """
    folder = Folder.open(path)
    if not folder.names():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    check_mark(folder.fd, path, KIND, LOCK)
    return folder


def _is_of_running_job(path: Path) -> bool:
    """Return whether a process holds the lock of an own folder that has no mark: it is a job of an
    earlier version of Paceline.
    """
    try:
        with Folder.open(path) as folder:
            return _is_own(os.fstat(folder.fd)) and _locked(folder)
    except OSError:
        return False


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _report(path: Path, error: OSError) -> None:
    if len(_reported) <= MAX_NAMED:
        hint = ""
        with contextlib.suppress(OSError):
            if _is_own(path.lstat()):  # it may be of an earlier version, and takes memory
                hint = f". HINT: if no other program needs it: rm -r {path}"
        sys.stderr.write(
            f"paceline: {path} {error.strerror}: Paceline does not use or remove it{hint}\n"
        )
    elif len(_reported) == MAX_NAMED + 1:
        sys.stderr.write(f"paceline: {path.parent} has more such folders\n")


def _lock(folder: Folder) -> int | None:
    """Acquire the folder's lock.

    Returns:
        The file descriptor, which holds the lock as long as this process and its children exist;
        None if another process holds it.
    """
    try:
        fd = folder.open_file(LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def running() -> list[Path]:
    """Return the folders of this user's jobs that run on this host, without changing anything."""
    found = []
    for folder in _folders(_prefix()):
        with folder:
            if _locked(folder):
                found.append(folder.path)
    return found


def _locked(folder: Folder) -> bool:
    """Return whether a process holds the folder's lock.

    The test acquires a shared lock for a moment, so that concurrent tests do not report the
    folder as locked. A ``clear_orphans`` at that moment skips the folder; the next one clears it.
    """
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


def write_destination(
    folder: Path, target: Path, command: list[str], run: str, env: Sequence[str] = ()
) -> None:
    """Label the record folder and the job folder, and store the destination of the records.

    Raises:
        OSError: A file can't be written.
    """
    write_label(target, command, run, env)
    try_write_label(folder, command, run)
    copy_on_clear(folder, target)


def write_label(folder: Path, command: list[str], run: str, env: Sequence[str] = ()) -> None:
    """Write into a folder which job its records belong to. Arguments: see ``Label``.

    Raises:
        OSError: The file can't be written.
    """
    label = Label(run, command, time.time(), socket.gethostname(), [*env])
    replace_file(folder / LABEL_FILE, json.dumps(asdict(label), indent=1).encode())


def try_write_label(folder: Path, command: list[str], run: str) -> None:
    """Write the label of a job folder. A failure (no space) is ignored, because only
    ``paceline top`` and ``report`` of a running job read the label.
    """
    with contextlib.suppress(OSError):
        write_label(folder, command, run)


def read_label(folder: Path) -> Label:
    """Return the label of a folder, or an empty one if it is missing or invalid."""
    try:
        return read_json(folder / LABEL_FILE, Label, MAX_LABEL_BYTES)
    except (OSError, InvalidFileError):
        return Label()


def read_destination(folder: Path) -> Path | None:
    """Return the folder on this host to which a job folder's records will be copied, or None."""
    try:
        found = read_json(folder / DESTINATION_FILE, Destination, MAX_LABEL_BYTES, escape=False)
    except (OSError, InvalidFileError):
        return None
    return Path(found.target) if found.target and not found.sent else None


def read_attempt(folder: Path) -> int | None:
    """Return the number of the attempt that began last; None if it was not recorded."""
    try:
        return int(read_regular(folder / ATTEMPT, 20))
    except (OSError, ValueError):
        return None


def copy_on_clear(folder: Path, target: Path) -> None:
    """Copy the records in ``folder`` to ``target`` when ``folder`` is cleared."""
    _write_destination_file(folder, {"target": str(target.absolute())})


def send_on_clear(folder: Path) -> None:
    """Move the records in ``folder`` to its subfolder TO_SEND when ``folder`` is cleared. The agent
    then sends them to the launcher's host.
    """
    _write_destination_file(folder, {"sent": True})


def _write_destination_file(folder: Path, found: dict[str, Any]) -> None:
    with Folder.open(folder) as opened:
        opened.write(DESTINATION_FILE, json.dumps(found).encode())


def write_attempt(folder: Path, number: int) -> None:
    """Store that attempt ``number`` begins: only its records count as the run's records."""
    # nearly always the attempt can be read from the records as well
    with contextlib.suppress(OSError), Folder.open(folder) as opened:
        opened.write(ATTEMPT, str(number).encode())


def clear(folder: Path, orphan: bool = False) -> bool:
    """Copy the records in a job folder to their destination, and remove the folder.

    Never raises. If the records can't be copied, the folder is not removed, and is reported once.

    Args:
        folder: The job folder.
        orphan: Whether no process is left that could send the records to another host. A copy
            that failed before is then tried again.

    Returns:
        Whether no record was lost: all are copied, or are waiting to be sent.
    """
    try:
        opened = _open(folder)
    except FileNotFoundError:
        return True  # another process has removed it
    except OSError as error:
        sys.stderr.write(f"paceline: the record of this job is lost: {folder} {error.strerror}\n")
        return False
    with opened:
        if opened.status(DESTINATION_FILE) is None:
            opened.remove_all(last=LOCK)
            return True
        if opened.status(FAILED) is not None and not orphan:
            return False
        try:
            found = read_json(
                DESTINATION_FILE, Destination, MAX_LABEL_BYTES, dir_fd=opened.fd, escape=False
            )
            if found.sent and orphan:
                sys.stderr.write(
                    "paceline: the records of this node are lost: its agent has ended\n"
                )
            elif found.sent:
                _set_aside(opened)
                return True
            else:
                target = Path(found.target)
                target.mkdir(parents=True, exist_ok=True)  # the script may have removed it
                copy_records(opened, target, read_attempt(folder))
        except Exception as error:
            _report_copy_failure(opened, error)
            return False
        opened.remove_all(last=LOCK)
        return True


def remove(folder: Path) -> None:
    """Remove a job folder and all its contents. Never raises."""
    with contextlib.suppress(OSError), _open(folder) as opened:
        opened.remove_all(last=LOCK)


def _report_copy_failure(folder: Folder, error: Exception) -> None:
    sys.stderr.write(
        f"paceline: the record could not be saved ({printable(str(error))}). It is in "
        f"{folder.path}; the next paceline run on this node tries again. HINT: free space at the "
        f"destination, or cp {folder.path}/*.ring to another folder\n"
    )
    with contextlib.suppress(OSError):  # without the marker the failure is reported again
        os.close(folder.open_file(FAILED, os.O_WRONLY | os.O_CREAT))


def _set_aside(folder: Folder) -> None:
    """Copy the records to TO_SEND, and remove the ring files, which may be large."""
    if folder.status(TO_SEND) is not None:
        return
    part = f"{TO_SEND}.part"
    folder.remove(part)
    with folder.subfolder(part, make=True) as waiting:
        copy_records(folder, waiting.path, read_attempt(folder.path))
    folder.rename(part, TO_SEND)
    for name in folder.names():
        if name.endswith((".ring", *SIDECAR_SUFFIXES, ".stack")):
            folder.remove(name)
