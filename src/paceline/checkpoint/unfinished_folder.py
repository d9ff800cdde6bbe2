"""The temporary folder in which the ranks of a job write one checkpoint.

The name of the folder is predictable, because all ranks must use the same name. So another user can
create a folder or a link of that name first, and links in the folder. Therefore the folder is
opened without following links, files are created relative to its descriptor, and the owner of the
folder must be the owner of these files. The owner is not compared with the user ID of the process,
because NFS may assign the files of root to the user nobody.

Old and unfinished checkpoints are removed, and nothing else that has such a name: a folder is a
checkpoint if its manifest is valid and of the step in the name, and an unfinished one if it has the
mark that ``UnfinishedFolder`` writes. Only files that Paceline has written are removed: a folder
with other files remains, with these.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
from pathlib import Path

from ..security.files import UnsafeFileError, kind_of_file
from ..security.folders import NewFile, open_folder
from ..security.removal import MARK, has_mark, write_mark
from .manifest import MANIFEST, DamagedCheckpointError, Manifest, read_manifest

KIND = "unfinished checkpoint"  # of the mark
_STEP = re.compile(r"\.?step-(\d{8,18})")
# Files of an unfinished checkpoint: shards, the manifest, and both while they are written.
_WRITTEN = re.compile(r"\.?(rank-\d{5,}\.pt|manifest\.json)(\.\w+\.part)?")
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_FDCWD = -100  # of <fcntl.h>
_RENAME_EXCHANGE = 2  # of <linux/fs.h>
_NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


class UnfinishedFolder:
    """The temporary folder of one checkpoint, with an open descriptor.

    Attributes:
        path: Path of the folder.
        fd: Descriptor of the folder.
        has_final_name: Whether the folder was renamed: the checkpoint is complete.
        replaced: Path of the checkpoint that had the final name before; None if there was none.
    """

    def __init__(self, path: Path) -> None:
        """Create the folder, or open it if another rank has created it.

        Raises:
            UnsafeFileError: A link or a file has the name of the folder.
            OSError: The folder can't be created or opened.
        """
        self.path = path
        self.has_final_name = False
        self.replaced: Path | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        try:
            self.fd = os.open(path, _FLAGS)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            kind = kind_of_file(path.lstat().st_mode)
            raise self._unsafe(f"is {kind}, not a folder") from None
        try:
            if not os.listdir(self.fd):  # else another rank has marked it, or it is not Paceline's
                write_mark(self.fd, KIND)
        except BaseException:
            self.close()
            raise

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
        """Rename the folder to its final name; ``replaced`` is the checkpoint that had it before.

        The two exchange their names in one step, so that one of them has the final name at any
        moment. On a file system without such an exchange (NFS) the replaced checkpoint is renamed
        first; if the process ends then, ``remove_unfinished`` gives it its name back.

        Raises:
            UnsafeFileError: The folder was replaced by another one under the temporary name.
            FileExistsError: A file has the final name.
            OSError: The folder can't be renamed.
        """
        if not os.path.samestat(self.path.lstat(), os.fstat(self.fd)):
            raise self._unsafe("was replaced by another folder")
        replaced = None
        if os.path.lexists(final):  # saved again: at an epoch's end, or after a restart
            mode = final.lstat().st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISLNK(mode):
                reason = f"{final.name} is {kind_of_file(mode)}, not a folder"
                raise FileExistsError(errno.EEXIST, reason, str(final))
            if exchange_names(self.path, final):
                replaced = self.path
            else:
                # The name is random, so that no other user can have created it before.
                replaced = final.with_name(f".{final.name}.{secrets.token_hex(8)}.old.tmp")
                final.rename(replaced)
        if replaced != self.path:
            try:
                self.path.rename(final)
            except OSError:
                if replaced is not None:
                    replaced.rename(final)
                raise
        self.has_final_name, self.replaced = True, replaced

    def complete(self) -> bool:
        """Flush the complete checkpoint; it is no longer marked as one that may be removed.

        Return whether the names were flushed as well. Raises OSError.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(MARK, dir_fd=self.fd)
        return flush_folder(self.fd)

    def close(self) -> None:
        """Close the descriptor of the folder."""
        os.close(self.fd)

    def _unsafe(self, reason: str) -> UnsafeFileError:
        return UnsafeFileError(errno.EPERM, f"{self.path.name} {reason}", str(self.path))


def exchange_names(folder: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; return False if that is not possible.

    Kernel, C library and file system must support RENAME_EXCHANGE of renameat2(2).
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    paths = os.fsencode(folder), os.fsencode(other)
    return bool(renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def flush_folder(fd: int) -> bool:
    """Flush the names in a folder to disk; return False if its file system has no such operation.

    Raises:
        OSError: The folder can't be flushed for another reason.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
        return False
    return True


def remove_checkpoint(path: Path) -> bool:
    """Remove a complete, incomplete or unfinished checkpoint; never raises.

    Returns:
        Whether the path no longer exists. It remains if Paceline has not written it.
    """
    with contextlib.suppress(OSError):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):  # its target remains
            path.unlink()
        elif stat.S_ISDIR(mode):
            _remove_folder(path)
        elif not path.lstat().st_size:  # the token of a start that was interrupted
            path.unlink()
    return not os.path.lexists(path)


def _remove_folder(path: Path) -> None:
    opened = open_folder(path)
    try:
        last = [MANIFEST, MARK]  # the proofs
        manifest = _manifest(path, opened)
        names = [] if manifest is None else [entry["name"] for entry in manifest["files"]]
        if has_mark(opened, KIND):
            names += [name for name in os.listdir(opened) if _WRITTEN.fullmatch(name)]
        elif manifest is None:
            last = []
        for name in [*(name for name in names if name not in last), *last]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)
    path.rmdir()  # only an empty folder


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has the manifest of the checkpoint whose name it has."""
    try:
        opened = open_folder(path)
    except OSError:
        return False
    try:
        return _manifest(path, opened) is not None
    finally:
        os.close(opened)


def replaces(final: Path | None, old: Path) -> bool:
    """Return whether a checkpoint with its final name replaces an older one of the same user."""
    if final is None or not is_checkpoint(final):
        return False
    return final.stat().st_uid == old.stat().st_uid


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint has a manifest, and all shards of the right size."""
    try:
        entries = read_manifest(path)["files"]
        return is_checkpoint(path) and all(
            (path / entry["name"]).lstat().st_size == entry["bytes"] for entry in entries
        )
    except (OSError, DamagedCheckpointError):
        return False


def _manifest(path: Path, opened: int) -> Manifest | None:
    """Return the manifest of an open folder, if it is of the step in the folder's name."""
    step = _STEP.match(path.name)
    try:
        found = read_manifest(path, opened)
    except DamagedCheckpointError:
        return None
    return found if step and found.get("step") == int(step[1]) else None
