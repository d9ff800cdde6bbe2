"""The journal of a study: an Optuna JournalStorage file beside the study file.

Only the runner of the study writes it, apart from programs such as optuna-dashboard, for which
Optuna's own lock is used. A runner that was killed leaves two things that stop Optuna: that lock,
which Optuna frees after 30 s, and the beginning of a line, after which it reads no line.
``open_journal`` removes both; the runner then holds the lock of the study's folder.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...security.files import open_regular

if TYPE_CHECKING:
    from optuna.storages import JournalStorage

LOCK_SUFFIX = ".lock"  # of Optuna
# Another program holds the lock for the milliseconds of a write; a killed runner for ever.
STALE_LOCK_S = 1.0
POLL_S = 0.05
TAIL_BYTES = 1 << 16
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class JournalFullError(OSError):
    """The journal could not be written; its content is as before."""


def check_installed() -> None:
    """Raise ValueError if Optuna is not installed, or too old."""
    try:
        import optuna
    except ImportError:
        raise ValueError(
            "paceline tune needs Optuna, which is not installed. HINT: pip install 'paceline[tune]'"
        ) from None
    major = optuna.__version__.partition(".")[0]
    if major.isdigit() and int(major) < 5:
        raise ValueError(
            f"paceline tune needs Optuna 5 or newer; this is {optuna.__version__}. HINT: pip "
            "install 'paceline[tune]'"
        )


def open_journal(path: Path, writes: bool) -> "JournalStorage":
    """Return the storage of a journal, and create the file if ``writes``.

    Args:
        path: The journal.
        writes: Whether this process is the study's runner. It must hold the lock of the folder.

    Raises:
        ValueError: The file is no journal.
        OSError: It can't be read or written.
    """
    import optuna
    from optuna.storages import JournalStorage

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if writes:
        os.close(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o666))
        remove_stale_lock(path)
        remove_partial_line(path)
    try:
        return JournalStorage(_backend(path))
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(
            f"{path} can't be read as a journal of Optuna: {error}. HINT: move the file away, or "
            "restore it from a backup"
        ) from None


def _backend(path: Path) -> Any:
    from optuna.storages.journal import JournalFileBackend

    class Backend(JournalFileBackend):
        """Appends whole records or nothing."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            before = os.stat(path).st_size
            try:
                super().append_logs(logs)
            except OSError as error:
                _truncate(path, before)
                raise JournalFullError(error.errno, error.strerror, str(path)) from None

    return Backend(str(path))


def _truncate(path: Path, size: int) -> None:
    """Remove what was written of a record, up to the last complete line."""
    try:
        with open(open_regular(path, os.O_RDWR), "r+b") as file:
            if os.fstat(file.fileno()).st_size > size:
                file.truncate(size)
    except OSError:
        pass  # remove_partial_line does it at the next start


def remove_partial_line(path: Path) -> bool:
    """Remove the beginning of a line at the end of the file; return whether there was one.

    It is a record that was not confirmed. Later records would make it unreadable.
    """
    with open(open_regular(path, os.O_RDWR), "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - TAIL_BYTES, 0)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if end < size:
            file.truncate(end)
        return end < size


def remove_stale_lock(path: Path) -> bool:
    """Remove the lock of a writer that was killed; return whether there was one."""
    lock = Path(f"{path}{LOCK_SUFFIX}")
    seen, since = _identity(lock), time.monotonic()
    while seen is not None:
        if time.monotonic() - since >= STALE_LOCK_S:
            try:
                os.unlink(lock)
            except FileNotFoundError:
                return False
            return True
        time.sleep(POLL_S)
        now = _identity(lock)
        if now != seen:  # its holder is alive
            seen, since = now, time.monotonic()
    return False


def _identity(lock: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(lock)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


@contextmanager
def full_disk_in_words(path: Path) -> Iterator[None]:
    """Turn a failed write into a sentence that says what remains.

    Raises:
        ValueError: A write failed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise ValueError(
            f"{error.filename or path} can't be written: {error.strerror}. All trials that ended "
            f"are in the journal. HINT: free some space (df -h {path.parent}), then paceline tune "
            f"{path} --continue"
        ) from error
