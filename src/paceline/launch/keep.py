"""Keep a run's record: from node-local memory to the folder that the user named.

The promise lies in the job's folder, so that whoever is left at the end can fulfil it: the rank
server, the launcher after it, or the next ``paceline run`` on this host.
"""

import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..record.states import NOTES

PROMISE = "keep.json"
ATTEMPT = "attempt"
ABOUT = "run.json"


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
    """A folder in node-local memory for a job's records.

    Its lock lives as long as any process of the job. Folders whose lock is free are of jobs
    that were killed altogether: what they promised is done here, and they are removed.
    """
    rescue()
    name = secrets.token_hex(6)
    for place in _PLACES:
        unlocked = place / f"paceline-new-{name}"  # not yet one that others would clear
        try:
            unlocked.mkdir(mode=0o700)
        except OSError:
            continue
        _lock(unlocked)
        return unlocked.rename(place / (_prefix() + name))
    raise ValueError(f"neither {' nor '.join(map(str, _PLACES))} can be written to")


def rescue() -> None:
    """Clear the folders of jobs that were killed together with all that would have done it."""
    for place in _PLACES:
        for old in place.glob(_prefix() + "*"):
            if _lock(old):
                clear(old, orphan=True)


_PLACES = (Path("/dev/shm"), Path(tempfile.gettempdir()))


def _prefix() -> str:
    return f"paceline-job-{os.getuid()}-"


def _lock(folder: Path) -> bool:
    """Take the folder's lock, for as long as this process and its children live; whether it
    was free."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return False
    return True


def running() -> list[Path]:
    """The folders of this user's jobs that run on this host. Looking changes nothing."""
    found = [folder for place in _PLACES for folder in sorted(place.glob(_prefix() + "*"))]
    return [folder for folder in found if _locked(folder)]


def _locked(folder: Path) -> bool:
    """Whether somebody holds the folder's lock. It is shared for the moment of the question, so
    that another who asks is not told wrong; a rescue at that very moment is left to the next."""
    try:
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
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
    """Say in a folder whose records it holds."""
    host = socket.gethostname()
    about = {"run": run, "command": command, "started": time.time(), "host": host}
    (folder / ABOUT).write_text(json.dumps(about, indent=1))


def introduce(folder: Path, command: list[str], run: str) -> None:
    """``label`` a job's own folder, if there is room: only who looks at running jobs reads it."""
    try:
        label(folder, command, run)
    except OSError:
        pass


def about(folder: Path) -> dict[str, Any]:
    """What ``label`` has said in a folder; empty where it has not."""
    try:
        found = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def promised(folder: Path) -> Path | None:
    """Where the records in a job's folder are to go on this host, if anywhere."""
    try:
        promise = json.loads((folder / PROMISE).read_text())
        return None if promise.get("sent") else Path(promise["target"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def noted_attempt(folder: Path) -> int | None:
    """Which attempt of the job began last; None where nobody notes that."""
    try:
        return int((folder / ATTEMPT).read_text())
    except (OSError, ValueError):
        return None


def promise_to(folder: Path, target: Path, sent: bool = False) -> None:
    """The records in ``folder`` go to ``target`` when it is cleared; with ``sent``, to be sent
    on from there to another host, by the process that this one is cleared for."""
    promise = {"target": str(target.absolute()), "sent": sent}
    (folder / PROMISE).write_text(json.dumps(promise))


def note_attempt(folder: Path, number: int) -> None:
    """Attempt ``number`` begins: only its records are the run's."""
    try:
        (folder / ATTEMPT).write_text(str(number))
    except OSError:
        pass  # the records themselves say it too, nearly always


def clear(folder: Path, orphan: bool = False) -> None:
    """Copy the records in the job's folder to where they were promised, and remove it; never
    raises. A folder whose promise can't be kept stays, and is named. orphan: nobody is left who
    would send them on."""
    if (folder / PROMISE).exists():
        try:
            promise = json.loads((folder / PROMISE).read_text())
            target = Path(promise["target"])
            if orphan and promise.get("sent"):
                sys.stderr.write("paceline: the records of this host are lost with its agent\n")
                shutil.rmtree(target, ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
                return
            target.mkdir(parents=True, exist_ok=True)  # the script may have removed it
            _copy(folder, target)
        except Exception as error:
            said = f"paceline: the record could not be kept ({error}). It is in {folder}\n"
            sys.stderr.write(said)
            return
    shutil.rmtree(folder, ignore_errors=True)


def _copy(folder: Path, target: Path) -> None:
    """The last attempt's records to ``target``, earlier ones to attempt-N in it. Of an attempt that
    the job has gone on after, without this host, all are earlier ones."""
    from ..analyze.read import read, used_bytes

    found: dict[tuple[int, int], tuple[int, int, Path, bytes]] = {}
    for path in sorted(folder.glob("*.ring")):
        data = path.read_bytes()
        try:
            record = read(data, str(path))
            data = data[: used_bytes(data)]
        except ValueError as error:
            sys.stderr.write(f"paceline: {error}: it is kept as it is\n")
            _write(target / path.name, data)
            continue
        key = (int(record.meta.get("attempt", 0)), record.rank)
        told = _told(record)
        # A process that only started the ranks is nobody's record.
        if key not in found or told > found[key][0]:
            found[key] = (told, int(record.meta["size"]), path, data)
    sizes = {size for told, size, _, _ in found.values() if told}
    noted = (folder / ATTEMPT).read_text() if (folder / ATTEMPT).exists() else "0"
    last = max([int(noted), *(attempt for attempt, _ in found)])
    there = {target / f"rank-{rank}.ring" for rank in (0, *(rank for _, rank in found))}
    last = max([last, *map(_attempt, there)])
    for (attempt, rank), (told, size, path, data) in found.items():
        if not told and sizes and size not in sizes:
            continue
        place = target if attempt == last else target / f"attempt-{attempt}"
        place.mkdir(exist_ok=True)
        _write(place / f"rank-{rank}.ring", data)
        lines = path.with_suffix(".lines")
        if lines.exists():
            _write(place / f"rank-{rank}.lines", lines.read_bytes())


def _attempt(path: Path) -> int:
    """Of a record that may be there."""
    from ..analyze.read import read

    try:
        return int(read(path.read_bytes()).meta.get("attempt", 0))
    except (OSError, ValueError):
        return 0


def _told(record: Any) -> int:
    """Events that say more than where the script was."""
    return int(len(record.events) - record.count(*NOTES))


def _write(path: Path, data: bytes) -> None:
    # The launcher may write a record of the same rank there, of a later attempt.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    partial.write_bytes(data)
    os.replace(partial, path)
