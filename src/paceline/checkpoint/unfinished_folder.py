"""The temporary folder in which the ranks of a job write one checkpoint.

The name of the folder is predictable, because all ranks must use the same name. So another user can
create a folder or a link of that name first, and links in the folder. Therefore the folder is
opened without following links, files are created relative to its descriptor, and the owner of the
folder must be the owner of these files. The owner is not compared with the user ID of the process,
because NFS may assign the files of root to the user nobody.
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
    """The temporary folder of one checkpoint, with an open descriptor.

    Attributes:
        path: Path of the folder.
        fd: Descriptor of the folder.
    """

    def __init__(self, path: Path) -> None:
        """Create the folder, or open it if another rank has created it.

        Raises:
            UnsafeFileError: A link or a file has the name of the folder.
            OSError: The folder can't be created or opened.
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
        """Open a new file, which replaces an existing file or link of that name when complete.

        Raises:
            UnsafeFileError: The folder belongs to another user.
            OSError: The file can't be created.
        """
        file = NewFile(name, dir_fd=self.fd)
        owner = os.fstat(self.fd).st_uid
        if owner != os.fstat(file.fd).st_uid:
            file.discard()
            raise self._unsafe(f"belongs to user {owner}")
        return file

    def rename(self, final: Path) -> None:
        """Flush the folder and rename it to its final name.

        Raises:
            UnsafeFileError: The folder was replaced by another one under the temporary name.
            OSError: The folder can't be renamed.
        """
        os.fsync(self.fd)
        if not os.path.samestat(self.path.lstat(), os.fstat(self.fd)):
            raise self._unsafe("was replaced by another folder")
        self.path.rename(final)

    def close(self) -> None:
        """Close the descriptor of the folder."""
        os.close(self.fd)

    def _unsafe(self, reason: str) -> UnsafeFileError:
        return UnsafeFileError(errno.EPERM, f"{self.path.name} {reason}", str(self.path))


def remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link (not its target). Ignore errors."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)  # does not follow links
        else:
            path.unlink()
