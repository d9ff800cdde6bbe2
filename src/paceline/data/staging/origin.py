"""Where a set was packed, as staging reads it: each file is opened once, and looked at open.

What is shared with a group is copied for it, so each file must be one that the group can read where
it lies. That is looked at on the opened descriptor, in a folder that is held open: a link, or a
folder that is exchanged meanwhile, leads nowhere else.
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
    """The folder of a packed set.

    Args:
        path: The folder.
        shared: Whether what is opened is for the members of the group that owns the folder.

    Attributes:
        group: ID of that group; None where nothing is shared.

    Raises:
        ValueError: This user is no member of the group, or the folder is closed to it.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self.path, self.group = path, None
        if not shared:
            return
        real = path.resolve()
        self._fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.group = os.fstat(self._fd).st_gid
        hint = "HINT: without --shared"
        if not own_group(self.group):
            raise ValueError(
                f"--shared: {path} belongs to group {self.group}, of which you are no member. "
                f"{hint}"
            )
        for folder in real.parents:
            check_entered(folder, self.group, hint)
        if not group_may(self._fd, self.group, ENTER):
            raise ValueError(f"--shared: {path} is closed to group {self.group}. {hint}")

    def __del__(self) -> None:
        if "_fd" in self.__dict__:
            os.close(self._fd)

    def open(self, name: str) -> int:
        """Open a file of the set; its descriptor.

        Raises:
            ValueError: It is to be shared, and the group can't read it here, or it is a link.
            OSError: It can't be opened, or is no regular file.
        """
        if self.group is None:
            return open_regular(self.path / name)
        fd = open_regular(name, dir_fd=self._fd, follow_links=False)
        if not group_may(fd, self.group, READ):
            os.close(fd)
            raise ValueError(
                f"--shared: group {self.group} can't read {self.path / name}. HINT: without "
                "--shared, or chmod g+r"
            )
        return fd

    def mode(self, name: str) -> int:
        """Return the permissions for a copy of a file: the file's own. In a group's folder nobody
        but the owner may write to it, and the group may read it. Raises as ``open``."""
        fd = self.open(name)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode) & 0o777
        finally:
            os.close(fd)
        return mode if self.group is None else mode & 0o700 | 0o440


def check_entered(folder: Path, group: int, hint: str) -> None:
    """Raise ValueError where members of a group can't enter a folder."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not group_may(fd, group, ENTER):
            raise ValueError(f"--shared: {folder} is closed to group {group}. {hint}")
    finally:
        os.close(fd)


def group_may(fd: int, group: int, permission: int) -> bool:
    """Whether members of a group may read (4) or enter (1) what is open, by its mode and its
    access control list."""
    status = os.fstat(fd)
    if status.st_gid != group and status.st_mode & permission:
        return True
    entries: list[tuple[int, int, int]] = []
    with contextlib.suppress(OSError):  # none, or a file system without them
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
