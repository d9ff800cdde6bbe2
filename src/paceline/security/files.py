"""Open files that another user or another program may have created.

Opening a FIFO would block, a device never ends, and a link may point anywhere. Each open is
therefore non-blocking, and is checked on the open descriptor, never on the path.
"""

import errno
import os
import stat
from pathlib import Path

from .text import printable

Name = str | os.PathLike[str]


class UnsafeFileError(OSError):
    """File that is not trusted: not a regular file, a link, or owned by another user."""


class InvalidFileError(ValueError):
    """File whose content violates its format.

    Attributes:
        file: Path of the file.
        reason: What is wrong with it.
    """

    def __init__(self, file: Name, reason: str) -> None:
        self.file, self.reason = Path(file), reason
        super().__init__(printable(f"{file}: {reason}", lines=True))

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        return type(self), (self.file, self.reason)


def error_reason(error: Exception) -> str:
    """Return the message of an error without the file's name, printable and on one line."""
    if isinstance(error, InvalidFileError):
        return printable(error.reason)
    if isinstance(error, OSError) and error.strerror:
        return printable(error.strerror)
    return printable(str(error))


def open_regular(
    path: Name,
    flags: int = os.O_RDONLY,
    *,
    dir_fd: int | None = None,
    follow_links: bool = True,
    owner: int | None = None,
    mode: int = 0o600,
) -> int:
    """Open ``path`` and return its descriptor if it is a regular file.

    Args:
        path: The file; relative to ``dir_fd`` if that is given.
        flags: Flags of ``os.open``; O_NONBLOCK, O_CLOEXEC and O_NOCTTY are added.
        dir_fd: Descriptor of the folder that ``path`` is relative to.
        follow_links: Whether ``path`` itself may be a symbolic link.
        owner: User ID that must own the file; None: any.
        mode: Permissions of a file that O_CREAT creates, before the umask is applied.

    Raises:
        UnsafeFileError: The path is a FIFO, socket, device, folder or link, or has another owner.
        OSError: The file can't be opened.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    if not follow_links:
        flags |= os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise UnsafeFileError(errno.ELOOP, "is a symbolic link", str(path)) from None
        if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
            raise UnsafeFileError(errno.ENXIO, "is no regular file", str(path)) from None
        raise
    try:
        check_regular(fd, path, owner)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(fd: int, path: Name, owner: int | None = None) -> os.stat_result:
    """Return the status of an open file. Raises UnsafeFileError like ``open_regular``."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        kind = kind_of_file(status.st_mode)
        raise UnsafeFileError(errno.EINVAL, f"is {kind} and no regular file", str(path))
    if owner is not None and status.st_uid != owner:
        raise UnsafeFileError(errno.EPERM, f"belongs to user {status.st_uid}", str(path))
    return status


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data`` to a descriptor. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def kind_of_file(mode: int) -> str:
    """Return the kind of a file from its ``st_mode``: "a FIFO", "a character device" ..."""
    kinds = (
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a symbolic link"),
    )
    return next((name for test, name in kinds if test(mode)), "a regular file")


def read_regular(
    path: Name,
    max_bytes: int,
    *,
    dir_fd: int | None = None,
    follow_links: bool = True,
    owner: int | None = None,
) -> bytes:
    """Return the content of a regular file.

    Raises:
        InvalidFileError: The file has more than ``max_bytes`` bytes. Nothing is read if its status
            already reports a larger size.
        UnsafeFileError, OSError: Same as for ``open_regular``.
    """
    fd = open_regular(path, dir_fd=dir_fd, follow_links=follow_links, owner=owner)
    with open(fd, "rb") as file:  # the file object now owns the descriptor
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise InvalidFileError(
                path, f"has {size:,} bytes, more than the limit of {max_bytes:,}"
            )
        data = file.read(size + 1)  # not of max_bytes, as memory is allocated for all of it
        if len(data) > size:  # files in /proc and growing files report a smaller size
            data += file.read(max_bytes + 1 - len(data))
    if len(data) > max_bytes:
        raise InvalidFileError(path, f"has more than the limit of {max_bytes:,} bytes")
    return data
