"""Folders of this user, or of a group, in places that other users can write to.

``/dev/shm``, ``/tmp`` and a node's disk are shared: a name in them may be another user's folder, or
a link. A folder is therefore trusted only by the ``fstat`` of its opened descriptor, and all files
in it are opened, created and removed relative to that descriptor, without following links.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from pathlib import Path

from .files import Name, UnsafeFileError, kind_of_file, open_regular, read_regular, write_all

_remove_tree = shutil.rmtree  # by descriptors; experiments replace the function for scripts
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NewFile:
    """File that gets its name at ``commit``, when it is complete.

    Until then it has a random name in the same folder; ``discard`` removes it. A link of the final
    name is replaced and never followed.

    Attributes:
        fd: Descriptor for writing.
        part: Temporary name.
    """

    def __init__(self, path: Name, mode: int = 0o666, dir_fd: int | None = None) -> None:
        """Create the file; the umask is applied to ``mode``. Raises OSError."""
        self._name, self._dir_fd = str(path), dir_fd
        folder, base = os.path.split(self._name)
        self.part = os.path.join(folder, f".{base[:200]}.{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self.fd = open_regular(self.part, flags, dir_fd=dir_fd, follow_links=False, mode=mode)

    def write(self, data: bytes | memoryview) -> None:
        """Write all of ``data``. Raises OSError."""
        write_all(self.fd, data)

    def commit(self) -> None:
        """Rename the file to its final name. Raises OSError."""
        self._close()
        os.replace(self.part, self._name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)

    def discard(self) -> None:
        """Remove the file if it is not committed; never raises."""
        self._close()
        with contextlib.suppress(OSError):
            os.unlink(self.part, dir_fd=self._dir_fd)

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.commit()
        except BaseException:
            self.discard()
            raise


class Folder:
    """Folder that only this user, or only the members of one group, can write to.

    It is held open as a descriptor until ``close`` or the end of the object. Names of files are
    plain: without ``/``, and not ``.`` or ``..``.

    Attributes:
        path: Path when the folder was opened; for messages, and for programs that need a path.
        fd: Descriptor of the folder.
        group: ID of the group whose members share it; None if it is private to this user.
    """

    def __init__(self, path: Path, fd: int, group: int | None = None) -> None:
        """Take ownership of ``fd``, an open folder.

        Raises:
            UnsafeFileError: Others can write to the folder.
        """
        self.path, self.fd, self.group = path, fd, group
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        status = os.fstat(self.fd)
        mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
        if self.group is None:
            if status.st_uid != user:
                raise UnsafeFileError(
                    errno.EPERM, f"belongs to user {status.st_uid}", str(self.path)
                )
            if mode & 0o077:
                raise UnsafeFileError(
                    errno.EPERM, f"is open to other users (mode {mode:04o})", str(self.path)
                )
            return
        if status.st_gid != self.group or mode & 0o007:
            raise UnsafeFileError(
                errno.EPERM,
                f"is not the folder of group {self.group} alone (group {status.st_gid}, mode "
                f"{mode:04o})",
                str(self.path),
            )
        trusted = {user, *root_ids()}
        if status.st_uid not in trusted and not is_member(status.st_uid, self.group):
            raise UnsafeFileError(
                errno.EPERM,
                f"belongs to user {status.st_uid}, who is not in group {self.group}",
                str(self.path),
            )

    @classmethod
    def open(cls, path: Path, group: int | None = None) -> "Folder":
        """Open an existing folder.

        Raises:
            UnsafeFileError: The path is a link or not a folder, or the folder is another user's or
                open to other users.
            OSError: The folder can't be opened.
        """
        return cls(path, open_folder(path), group)

    @classmethod
    def make(cls, path: Path, group: int | None = None, exist_ok: bool = False) -> "Folder":
        """Create the folder ``path``, mode 0700 (2770 for a group); its parent must exist.

        Raises:
            FileExistsError: The folder exists, and ``exist_ok`` is False.
            UnsafeFileError, OSError: Same as for ``open``.
        """
        _make(path, None, group, exist_ok)
        return cls.open(path, group)

    def subfolder(self, name: str, make: bool = False) -> "Folder":
        """Open the subfolder ``name`` with the same access; create it if ``make`` is True."""
        _plain(name)
        if make:
            _make(Path(name), self.fd, self.group, exist_ok=True)
        path = self.path / name
        return Folder(path, _opened(path, name, self.fd), self.group)

    def names(self) -> list[str]:
        """Return the sorted names of the folder's entries."""
        return sorted(os.listdir(self.fd))

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of a file, or of a link itself; None if it does not exist."""
        try:
            return os.stat(_plain(name), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a regular file and return its descriptor.

        This user must own the file; in a group's folder any user may. Raises UnsafeFileError,
        OSError.
        """
        owner = os.geteuid() if self.group is None else None
        return open_regular(_plain(name), flags, dir_fd=self.fd, follow_links=False, owner=owner)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a file. Raises InvalidFileError, UnsafeFileError, OSError."""
        owner = os.geteuid() if self.group is None else None
        return read_regular(
            _plain(name), max_bytes, dir_fd=self.fd, follow_links=False, owner=owner
        )

    def write(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Write or replace a file, completely or not at all, with exactly this mode."""
        with self.replacing(name, mode) as file:
            file.write(data)

    def make_file(self, name: str, mode: int) -> None:
        """Create an empty file of exactly this mode if it does not exist. Raises OSError."""
        new = self.replacing(name, mode)
        try:
            os.link(new.part, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            pass
        finally:
            new.discard()

    def replacing(self, name: str, mode: int = 0o600) -> NewFile:
        """Open a new file that gets its name when the body of a ``with`` statement succeeds.

        Otherwise it is removed. ``mode`` is set exactly, without the umask.
        """
        file = NewFile(_plain(name), 0o600, self.fd)
        os.fchmod(file.fd, mode)
        return file

    def rename(self, old: str, new: str) -> None:
        """Rename a file or subfolder."""
        os.rename(_plain(old), _plain(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a file, a link itself, or a subfolder with its content, if it exists.

        Raises OSError.
        """
        with contextlib.suppress(FileNotFoundError):
            remove_entry(_plain(name), self.fd)

    def remove_all(self, last: str = "") -> None:
        """Remove the folder with its content, except what can't be removed.

        Args:
            last: Name of a file that is removed after all others, for example a lock.
        """
        remove_content(self.fd, last)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)  # removes only an empty folder, whatever the path names by now

    def move(self, path: Path) -> None:
        """Rename the folder within the same parent."""
        os.rename(self.path, path)
        self.path = path

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("fd", -1) >= 0:
            self.close()


def remove_content(folder_fd: int, last: str = "") -> None:
    """Remove all that is in an open folder, except what can't be removed; ``last`` comes last."""
    for name in sorted(os.listdir(folder_fd), key=lambda name: (name == last, name)):
        with contextlib.suppress(OSError):
            remove_entry(name, folder_fd)


def remove_entry(name: str, dir_fd: int) -> None:
    """Remove a file, a link itself, or a subfolder with its content. Raises OSError."""
    if stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
        _remove_tree(name, dir_fd=dir_fd)  # does not follow links
    else:
        os.unlink(name, dir_fd=dir_fd)


def is_member(user: int, group: int) -> bool:
    """Whether a user belongs to a group; False if the system does not know the user or group."""
    import pwd

    try:
        account = pwd.getpwuid(user)
        # The group's list of members is not used, as many directory services leave it empty.
        return group in os.getgrouplist(account.pw_name, account.pw_gid)
    except KeyError:
        return False


def root_ids() -> set[int]:
    """Return the user IDs that files of root may have on this system.

    This is 0, and in a user namespace that does not map 0 also the ID of all unmapped users.
    """
    try:
        maps = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if any(int(first) == 0 for first, _, _ in maps):
            return {0}
        return {0, int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return {0}


def can_be_renamed_by_others(place: Path) -> bool:
    """Whether other users may rename entries of ``place``.

    They may if another user owns it, or if others can write to it and it lacks the sticky bit. A
    path below it may then refer to something else at any time.
    """
    status = place.stat()
    if status.st_uid not in {os.geteuid(), *root_ids()}:
        return True
    return not status.st_mode & stat.S_ISVTX and writable_by_others(status)


def writable_by_others(status: os.stat_result) -> bool:
    """Whether the mode of a folder permits other users than its owner to create files in it."""
    by_group = status.st_mode & 0o020 and not _is_private(status.st_gid)
    return bool(by_group or status.st_mode & 0o002)


def _is_private(group: int) -> bool:
    """Whether a group has the name of this user, which then is its only member."""
    import grp
    import pwd

    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def own_group(group: int) -> bool:
    """Whether this process may act as a member of ``group``."""
    return group == os.getegid() or group in os.getgroups()


def open_folder(path: Path) -> int:
    """Open a folder that is not a link; return its descriptor. Raises UnsafeFileError, OSError."""
    return _opened(path, str(path), None)


def open_subfolder(path: Path) -> int:
    """Open the folder ``path``, creating it if needed, and return its descriptor.

    The parents of ``path`` are trusted; ``path`` itself must not be a link. Raises UnsafeFileError,
    OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    return open_folder(path)


def replace_file(path: Name, data: bytes, mode: int = 0o666, dir_fd: int | None = None) -> None:
    """Write ``path`` completely or not at all, in a folder that others may write to.

    A link of that name is replaced and never followed.

    Args:
        mode: Permissions, before the umask is applied.
        dir_fd: Descriptor of the folder that ``path`` is relative to.

    Raises:
        OSError: The file can't be written; no new file is left in the folder.
    """
    with NewFile(path, mode, dir_fd) as file:
        file.write(data)


def _plain(name: str) -> str:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise UnsafeFileError(errno.EINVAL, "is not a plain file name", repr(name))
    return name


def _opened(path: Path, name: str, dir_fd: int | None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        try:
            kind = kind_of_file(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
        except OSError:
            raise error from None
        if kind == "a folder":  # a parent is not a folder
            raise
        raise UnsafeFileError(error.errno, f"is {kind} and no folder", str(path)) from None


def _make(path: Path, dir_fd: int | None, group: int | None, exist_ok: bool) -> None:
    """Create a folder. A group's folder is first created as private under a temporary name."""
    try:
        if group is None:
            os.mkdir(path, 0o700, dir_fd=dir_fd)
            return
        os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    except FileExistsError:
        if not exist_ok:
            raise
        return
    except FileNotFoundError:
        if group is None:
            raise
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.mkdir(new, 0o700, dir_fd=dir_fd)
    fd = os.open(new, _FOLDER, dir_fd=dir_fd)
    try:
        os.fchown(fd, -1, group)
        os.fchmod(fd, 0o2770)
        os.rename(new, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.rmdir(new, dir_fd=dir_fd)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not exist_ok:
            raise
    finally:
        os.close(fd)
