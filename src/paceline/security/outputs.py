"""Write files whose names the user chose: reports, timelines, machine files.

A name may refer to a terminal, a pipe or a device, which must be written to and never replaced. In
``/tmp`` it may also be a link that another user made, which must be replaced and never followed.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .files import UnsafeFileError, kind_of_file
from .folders import NewFile, root_ids

MAX_LINKS = 40  # same as in the kernel
BUFFER_BYTES = 1 << 20
_OWN_DESCRIPTOR = re.compile(r"/proc/(\d{1,9})(?:/task/\d{1,9})?/fd/(\d{1,9})")


def write_output(path: Path, data: bytes | str) -> None:
    """Write ``path`` with ``open_output``; text is encoded as UTF-8. Raises OSError."""
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")
    with open_output(path) as file:
        file.write(data)


@contextmanager
def open_output(path: Path) -> Iterator[IO[bytes]]:
    """Open the file ``path`` for writing, for the body of a ``with`` statement.

    Terminals, pipes and character devices are written to. Links that belong to this user or to root
    are followed, other links are replaced. Any other file is replaced when the body ends without an
    error; otherwise it remains unchanged.

    Raises:
        UnsafeFileError: The path is a socket or a block device.
        OSError: The file can't be written.
    """
    target = output_target(path)
    fd = _open_in_place(target)
    if fd is not None:
        with open(fd, "wb", BUFFER_BYTES) as file:
            yield file
        return
    with NewFile(target) as new:
        _keep_mode(target, new.fd)
        with open(new.fd, "wb", BUFFER_BYTES, closefd=False) as file:
            yield file


def output_target(path: Path) -> Path:
    """Return the path that ``open_output`` writes to: ``path`` after following trusted links.

    Raises:
        OSError: There are too many links, or a link can't be read.
    """
    for _ in range(MAX_LINKS):
        if _own_descriptor(path) is not None:
            return path
        try:
            status = path.lstat()
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(status.st_mode) or not _is_trusted(path, status):
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _open_in_place(path: Path) -> int | None:
    """Return a descriptor if the file must not be replaced; None for all other names."""
    own = _own_descriptor(path)
    if own is not None:
        return os.dup(own)  # reopening would start at offset 0 and overwrite earlier output
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    mode = status.st_mode
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISFIFO(mode) and not _is_trusted(path, status):
        return None
    if not stat.S_ISFIFO(mode) and not stat.S_ISCHR(mode):
        raise UnsafeFileError(errno.EINVAL, f"is {kind_of_file(mode)}", str(path))
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    if not os.path.samestat(os.fstat(fd), status):
        os.close(fd)
        raise UnsafeFileError(errno.EAGAIN, "was replaced while it was opened", str(path))
    return fd


def _own_descriptor(path: Path) -> int | None:
    """Return N if ``path`` is descriptor N of this process: /proc/self/fd/N, /dev/fd/N."""
    place = Path(os.path.realpath(path.parent)) / path.name
    match = _OWN_DESCRIPTOR.fullmatch(str(place))
    return int(match[2]) if match and int(match[1]) == os.getpid() else None


def _is_trusted(path: Path, status: os.stat_result) -> bool:
    """Whether only this user or the system can have created ``path``.

    In a container, the owner of files in /dev may have no user ID, so /dev is always trusted.
    """
    system = os.path.realpath(path.parent) == "/dev"
    return status.st_uid in {os.geteuid(), *root_ids()} or system


def _keep_mode(path: Path, fd: int) -> None:
    """Copy the permissions of the regular file of this user that a new file replaces."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return
    mode = status.st_mode & 0o777
    if mode != os.fstat(fd).st_mode & 0o777:  # some file systems refuse fchmod
        os.fchmod(fd, mode)
