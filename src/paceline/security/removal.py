"""Remove folders that Paceline has created, and no others.

In a folder without sticky bit, another user can give any folder of this user the name of one of
Paceline's. What is to be removed is therefore opened first, and must prove that Paceline has
created it: by a file that Paceline put into it (the mark), or by the descriptor that is open since
then. The content is removed relative to that descriptor, and the name only if it is empty.
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from .files import InvalidFileError, UnsafeFileError, read_regular
from .folders import NewFile, open_folder, remove_content, remove_entry, root_ids

MARK = ".paceline"
MAX_MARK_BYTES = 64
REMOVED_PREFIX = "gone-"  # of an entry that is being removed


def write_mark(folder_fd: int, kind: str, name: str = MARK) -> None:
    """Mark a new folder as one that Paceline may remove with its content.

    Args:
        kind: What the folder is for: a mark of another kind is no proof.
        name: Name of the file.

    Raises:
        OSError: The file can't be written.
    """
    with NewFile(name, dir_fd=folder_fd) as file:
        file.write(_text(kind))


def has_mark(folder_fd: int, kind: str, name: str = MARK) -> bool:
    """Return whether ``write_mark`` has marked the folder, and this user or root owns it."""
    if os.fstat(folder_fd).st_uid not in {os.geteuid(), *root_ids()}:
        return False
    try:
        found = read_regular(name, MAX_MARK_BYTES, dir_fd=folder_fd, follow_links=False)
    except (OSError, InvalidFileError):
        return False
    return found == _text(kind)


def _text(kind: str) -> bytes:
    return f"folder of paceline: {kind}\n".encode()


def check_mark(folder_fd: int, path: Path, kind: str, name: str = MARK) -> None:
    """Raise UnsafeFileError if Paceline has not created the folder for this user."""
    owner = os.fstat(folder_fd).st_uid
    if owner not in {os.geteuid(), *root_ids()}:
        raise UnsafeFileError(errno.EPERM, f"belongs to user {owner}", str(path))
    if not has_mark(folder_fd, kind, name):
        raise UnsafeFileError(errno.EPERM, "was not created by Paceline", str(path))


def remove_marked(path: Path, kind: str) -> None:
    """Remove a marked folder with its content, except what can't be removed; or a link itself.

    Raises:
        UnsafeFileError: Paceline has not created the folder.
        OSError: There is no folder of that name, or it can't be opened.
    """
    if path.is_symlink():
        path.unlink()
        return
    fd = open_folder(path)
    try:
        check_mark(fd, path, kind)
        _permit(".", fd)
        remove_content(fd, last=MARK)
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.rmdir(path)  # removes only an empty folder


def remove_from_marked(path: Path, kind: str) -> None:
    """Remove a file, a link itself, or a subfolder with its content from a marked folder.

    It is renamed first, so that processes which still write to it fail.

    Raises:
        UnsafeFileError: Paceline has not created the folder that contains it.
        OSError: It can't be removed.
    """
    fd = open_folder(path.parent)
    try:
        check_mark(fd, path.parent, kind)
        gone = f"{REMOVED_PREFIX}{path.name}"
        with contextlib.suppress(OSError):
            os.rename(path.name, gone, src_dir_fd=fd, dst_dir_fd=fd)
        for entry in (gone, path.name):
            with contextlib.suppress(FileNotFoundError):
                remove_entry(entry, fd)
    finally:
        os.close(fd)


class TemporaryFolder:
    """New folder of this user, with mode 0700, that is removed with its content at the end.

    Attributes:
        path: Path of the folder.
    """

    def __init__(self, prefix: str = "paceline-", parent: Path | None = None) -> None:
        """Create the folder in ``parent``, by default in the temporary folder.

        Raises:
            UnsafeFileError: Another user has replaced the new folder.
            OSError: The folder can't be created.
        """
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._fd = open_folder(self.path)
        if os.listdir(self._fd):
            os.close(self._fd)
            raise UnsafeFileError(errno.EPERM, "was replaced by another folder", str(self.path))

    def remove_inside(self, path: Path) -> None:
        """Remove a folder inside, if it exists, with all that can be removed."""
        name = str(path.relative_to(self.path))
        with contextlib.suppress(FileNotFoundError):
            _permit(name, self._fd)
            shutil.rmtree(name, ignore_errors=True, dir_fd=self._fd)

    def remove(self) -> None:
        """Remove the folder with its content, except what can't be removed. Never raises."""
        if self._fd < 0:
            return
        _permit(".", self._fd)
        remove_content(self._fd)
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def _permit(name: str, folder_fd: int) -> None:
    """Permit this user to remove the content: overlayfs leaves folders without permissions."""
    for _, folders, _, at in os.fwalk(name, dir_fd=folder_fd):
        for folder in folders:
            with contextlib.suppress(OSError):
                mode = os.stat(folder, dir_fd=at, follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
                    os.chmod(folder, 0o700, dir_fd=at)
