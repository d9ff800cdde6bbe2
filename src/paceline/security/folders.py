"""Folders of this user, or of a group, in places that other users write to as well.

``/dev/shm``, ``/tmp`` and a node's disk are shared: a name in them may be another user's folder, or
a link. So a folder is believed by what ``fstat`` says of the opened descriptor, and everything in
it is opened, made and removed relative to that descriptor, without following links.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from pathlib import Path

from .files import Name, UnsafeFileError, kind_of_file, open_regular, read_regular

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NewFile:
    """A file that gets its name when it is whole: at ``commit``. Until then it has another, random
    one beside it; ``discard`` removes it. A link of its name is replaced and never followed.

    Attributes:
        fd: Its descriptor, for writing.
        part: Its name until then.
    """

    def __init__(self, path: Name, mode: int = 0o666, dir_fd: int | None = None) -> None:
        """mode: less the umask. Raises OSError."""
        self._name, self._dir_fd = str(path), dir_fd
        folder, base = os.path.split(self._name)
        self.part = os.path.join(folder, f".{base[:200]}.{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self.fd = open_regular(self.part, flags, dir_fd=dir_fd, follow_links=False, mode=mode)

    def write(self, data: bytes | memoryview) -> None:
        """Write all of ``data``. Raises OSError."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]

    def commit(self) -> None:
        """Give the file its name. Raises OSError."""
        self._close()
        os.replace(self.part, self._name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)

    def discard(self) -> None:
        """Remove the file, if it is not committed; never raises."""
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
    """A folder that only this user, or only the members of one group, can write to.

    Held open as a descriptor until ``close`` or the end of the object. Names of files are plain:
    no ``/``, not ``.`` or ``..``.

    Attributes:
        path: Where it was when it was opened; for messages, and for programs that need a path.
        group: ID of the group whose members share it; None: this user's alone.
    """

    def __init__(self, path: Path, fd: int, group: int | None = None) -> None:
        """Take over ``fd``, an open folder. Raises UnsafeFileError where others can write to it."""
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
            UnsafeFileError: It is a link, no folder, another user's, or open to other users.
            OSError: It can't be opened.
        """
        return cls(path, _opened(path, str(path), None), group)

    @classmethod
    def make(cls, path: Path, group: int | None = None, exist_ok: bool = False) -> "Folder":
        """Make the folder ``path``, mode 0700 (2770 for a group), in a folder that exists.

        Raises:
            FileExistsError: It is there already, and not ``exist_ok``.
            UnsafeFileError, OSError: As ``open``.
        """
        _make(path, None, group, exist_ok)
        return cls.open(path, group)

    def subfolder(self, name: str, make: bool = False) -> "Folder":
        """Open the folder ``name`` in this one, with the same access; ``make``: it may be new."""
        _plain(name)
        if make:
            _make(Path(name), self.fd, self.group, exist_ok=True)
        path = self.path / name
        return Folder(path, _opened(path, name, self.fd), self.group)

    def names(self) -> list[str]:
        """Return the names of what is in it, sorted."""
        return sorted(os.listdir(self.fd))

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of a file, or of a link itself; None where there is none."""
        try:
            return os.stat(_plain(name), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open_file(self, name: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
        """Open a regular file of the folder's owner (in a group's folder: of anyone); its
        descriptor. Raises UnsafeFileError, OSError."""
        owner = os.geteuid() if self.group is None else None
        return open_regular(
            _plain(name), flags, dir_fd=self.fd, follow_links=False, owner=owner, mode=mode
        )

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return a file's content. Raises InvalidFileError, UnsafeFileError, OSError."""
        owner = os.geteuid() if self.group is None else None
        return read_regular(
            _plain(name), max_bytes, dir_fd=self.fd, follow_links=False, owner=owner
        )

    def write(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file, whole or not at all, in the place of one of that name. mode: exactly."""
        with self.replacing(name, mode) as file:
            file.write(data)

    def make_file(self, name: str, mode: int) -> None:
        """Make an empty file of exactly this mode, unless there is one. Raises OSError."""
        new = self.replacing(name, mode)
        try:
            os.link(new.part, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            pass
        finally:
            new.discard()

    def replacing(self, name: str, mode: int = 0o600) -> NewFile:
        """Open a new file that gets its name when the body of a ``with`` ends without an error;
        else it is removed. mode: exactly, whatever the umask."""
        file = NewFile(_plain(name), 0o600, self.fd)
        os.fchmod(file.fd, mode)
        return file

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder in it."""
        os.rename(_plain(old), _plain(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a file, a link itself, or a folder with all that is in it; nothing where there is
        none. Raises OSError."""
        status = self.status(name)
        if status is None:
            return
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(name, dir_fd=self.fd)  # by descriptors, without following links
        else:
            os.unlink(name, dir_fd=self.fd)

    def remove_all(self, last: str = "") -> None:
        """Remove the folder with all that is in it; what can't be removed stays. last: name of a
        file that goes after all others, a lock say."""
        for name in sorted(self.names(), key=lambda name: name == last):
            with contextlib.suppress(OSError):
                self.remove(name)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)  # only an empty folder goes, whatever lies there by now

    def move(self, path: Path) -> None:
        """Give the folder another name in the same place."""
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


def is_member(user: int, group: int) -> bool:
    """Whether a user belongs to a group, as the system's accounts say; False where they don't
    know the user or the group."""
    import pwd

    try:
        account = pwd.getpwuid(user)
        # Not by the group's list of members, which many directory services leave empty.
        return group in os.getgrouplist(account.pw_name, account.pw_gid)
    except KeyError:
        return False


def root_ids() -> set[int]:
    """Return the user IDs that root's files have here: 0, or in a user namespace that does not
    map it the one of all IDs that are not mapped."""
    try:
        maps = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if any(int(first) == 0 for first, _, _ in maps):
            return {0}
        return {0, int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return {0}


def can_be_renamed_by_others(place: Path) -> bool:
    """Whether others may rename what is in ``place``: it is another user's, or others can write to
    it and it lacks the sticky bit. A path below it may mean something else at any time."""
    status = place.stat()
    if status.st_uid not in {os.geteuid(), *root_ids()}:
        return True
    if status.st_mode & stat.S_ISVTX:
        return False
    if status.st_mode & 0o020 and not _is_private(status.st_gid):
        return True
    return bool(status.st_mode & 0o002)


def _is_private(group: int) -> bool:
    """Whether a group is the one that has its only user's name."""
    import grp
    import pwd

    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def own_group(group: int) -> bool:
    """Whether this process may act as a member of ``group``."""
    return group == os.getegid() or group in os.getgroups()


def open_subfolder(path: Path) -> int:
    """Open the folder ``path``, which may be new, and return its descriptor. What leads to it is
    believed; it may not be a link itself. Raises UnsafeFileError, OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    return _opened(path, str(path), None)


def replace_file(path: Name, data: bytes, mode: int = 0o666, dir_fd: int | None = None) -> None:
    """Write ``path`` whole or not at all, in a folder that others may write to as well: a link of
    that name is replaced and never followed.

    Args:
        mode: Permissions, less the umask.
        dir_fd: Folder that ``path`` is relative to.

    Raises OSError; nothing new is left in the folder then.
    """
    with NewFile(path, mode, dir_fd) as file:
        file.write(data)


def _plain(name: str) -> str:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise UnsafeFileError(errno.EINVAL, "is not the plain name of a file", repr(name))
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
        if kind == "a folder":  # what leads to it is none
            raise
        raise UnsafeFileError(error.errno, f"is {kind} and no folder", str(path)) from None


def _make(path: Path, dir_fd: int | None, group: int | None, exist_ok: bool) -> None:
    """Make a folder. One for a group is made for this user alone first, under another name."""
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
