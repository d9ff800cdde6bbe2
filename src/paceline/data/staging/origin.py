"""Read the files of a packed dataset for staging: each is opened once, and checked while open.

A dataset that is shared with a group is copied for that group, so the group must be able to read
each file at the origin. Permissions are checked on the opened descriptor, relative to a folder that
is held open. A symbolic link, or a folder that is exchanged meanwhile, can therefore not redirect
the access.
"""

import contextlib
import os
import stat
import struct
from pathlib import Path

from ...security.files import open_regular
from ...security.folders import own_group

READ, ENTER = 4, 1
ACL = "system.posix_acl_access"
_ENTRY = struct.Struct("<HHI")  # tag, permissions, ID
GROUP_OBJ, GROUP, MASK = 0x04, 0x08, 0x10  # tags (linux/posix_acl.h)


class Origin:
    """Folder of a packed dataset.

    Args:
        path: The folder.
        shared: Whether the files are staged for the members of the group that owns the folder.

    Attributes:
        group: ID of that group; None if the dataset is not shared.

    Raises:
        ValueError: This user is not a member of the group, or the group can't enter the folder.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self.path, self.group = path, None
        if not shared:
            return
        real = path.resolve()
        self._fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.group = os.fstat(self._fd).st_gid
        hint = "HINT: leave out --shared"
        if not own_group(self.group):
            raise ValueError(
                f"--shared: {path} belongs to group {self.group}, of which you are not a member. "
                f"{hint}"
            )
        for folder in real.parents:
            check_entered(folder, self.group, hint)
        if not group_may(self._fd, self.group, ENTER):
            raise ValueError(f"--shared: group {self.group} can't enter {path}. {hint}")

    def __del__(self) -> None:
        if "_fd" in self.__dict__:
            os.close(self._fd)

    def open(self, name: str) -> int:
        """Open a file of the dataset and return its descriptor.

        Raises:
            ValueError: The dataset is shared, and the file is a link or the group can't read it.
            OSError: The file can't be opened, or is not a regular file.
        """
        if self.group is None:
            return open_regular(self.path / name)
        fd = open_regular(name, dir_fd=self._fd, follow_links=False)
        if not group_may(fd, self.group, READ):
            os.close(fd)
            raise ValueError(
                f"--shared: group {self.group} can't read {self.path / name}. HINT: chmod "
                "g+r, or leave out --shared"
            )
        return fd

    def mode(self, name: str) -> int:
        """Return the permissions for the copy of a file.

        They are the permissions of the file itself. In a group's folder only the owner may write to
        the copy, and the group may read it. Raises the same errors as ``open``.
        """
        fd = self.open(name)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode) & 0o777
        finally:
            os.close(fd)
        return mode if self.group is None else mode & 0o700 | 0o440


def check_entered(folder: Path, group: int, hint: str) -> None:
    """Raise ValueError if the members of a group can't enter a folder."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not group_may(fd, group, ENTER):
            raise ValueError(f"--shared: group {group} can't enter {folder}. {hint}")
    finally:
        os.close(fd)


def group_may(fd: int, group: int, permission: int) -> bool:
    """Whether members of a group may read (4) or enter (1) an open file or folder.

    The mode and the access control list (ACL) decide.
    """
    status = os.fstat(fd)
    if status.st_gid != group and status.st_mode & permission:
        return True
    entries: list[tuple[int, int, int]] = []
    with contextlib.suppress(OSError):  # no ACL, or a file system without ACLs
        raw = os.getxattr(f"/proc/self/fd/{fd}", ACL)
        entries = list(_ENTRY.iter_unpack(raw[4:]))
    if not entries:
        return status.st_gid == group and bool(status.st_mode & permission << 3)
    mask = next((allowed for tag, allowed, _ in entries if tag == MASK), 7)
    return any(
        allowed & mask & permission
        for tag, allowed, of in entries
        if (tag == GROUP_OBJ and status.st_gid == group) or (tag == GROUP and of == group)
    )
