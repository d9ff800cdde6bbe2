"""The temporary folder in which the ranks of a job write one checkpoint.

The name of the folder is predictable, as all ranks must agree on it. So another user can make a
folder or a link of that name first, and links in it. The folder is opened without following a link,
its files are new files relative to its descriptor, and its owner must be the owner of these files.
The owner is not compared with the user ID of the process: NFS may give the files of root to nobody.
"""

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from ..security.files import UnsafeFileError, kind_of_file
from ..security.folders import NewFile

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UnfinishedFolder:
    """The temporary folder of one checkpoint, held open as a descriptor.

    Attributes:
        path: Path of the folder.
        fd: Its descriptor.
    """

    def __init__(self, path: Path) -> None:
        """Make the folder, or open the one that another rank made.

        Raises:
            UnsafeFileError: A link or a file has its name.
            OSError: The folder can't be made or opened.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        try:
            self.fd = os.open(path, _FLAGS)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            kind = kind_of_file(path.lstat().st_mode)
            raise self._unsafe(f"is {kind} and no folder") from None

    def new_file(self, name: str) -> NewFile:
        """Open a new file, which replaces a file or link of that name when it is complete.

        Raises:
            UnsafeFileError: The folder belongs to another user.
            OSError: The file can't be made.
        """
        file = NewFile(name, dir_fd=self.fd)
        owner = os.fstat(self.fd).st_uid
        if owner != os.fstat(file.fd).st_uid:
            file.discard()
            raise self._unsafe(f"belongs to user {owner}")
        return file

    def rename(self, final: Path) -> None:
        """Flush the folder and give it its final name.

        Raises:
            UnsafeFileError: Another folder has the temporary name by now.
            OSError: The folder can't be renamed.
        """
        os.fsync(self.fd)
        if not os.path.samestat(self.path.lstat(), os.fstat(self.fd)):
            raise self._unsafe("was replaced by another folder")
        self.path.rename(final)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def _unsafe(self, reason: str) -> UnsafeFileError:
        return UnsafeFileError(errno.EPERM, f"{self.path.name} {reason}", str(self.path))


def remove(path: Path) -> None:
    """Remove a folder with its content, or a file or link itself; what can't be removed stays."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)  # does not follow links
        else:
            path.unlink()
