"""Cover folders of the user, so that nothing that a script does changes them.

An overlay (overlayfs) shows a folder, and keeps every change in another one: files stay as they
are whatever opens them, native code and other programs included. The process from which a node's
ranks are forked mounts it in a mount namespace, for which an ordinary user needs a user namespace.
Some systems forbid these, and not every file system can be covered: ``Overlay.prepare`` finds out.
What no overlay covers is protected by an audit hook (record/experiments/protect_files.py).

``python -P -m paceline.security.overlay REQUEST`` covers the folders, and ends.
"""

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .folders import Folder
from .processes import python_command
from .removal import remove_marked, write_mark

VARIABLE = "PACELINE_OVERLAY"  # environment variable that holds Overlay.request()
NAME = "paceline"  # of the mounts
CHANGES = "changes of a script"  # kind of the mark of a folder that ``cover`` has created
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
# Folders that are never covered, with all that is in them.
SYSTEM_FOLDERS = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr"),
)
CACHES = (".cache", ".triton", ".nv")  # folders of the home folder that scripts may change
# File systems inside a covered folder that stay as they are: they hold no files of the user.
PSEUDO = {"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "debugfs", "bpf"}
PREPARE_TIMEOUT_S = 30
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Overlay:
    """Folders to cover.

    Attributes:
        folders: Folders to cover; none lies in another one.
        visible: Folders in them that stay as they are.
    """

    folders: tuple[str, ...]
    visible: tuple[str, ...]

    def request(self, changes: Path) -> str:
        """Return the value of the environment variable ``VARIABLE``, for ``cover``.

        Args:
            changes: Folder for what changes. What an earlier script has changed is visible.
        """
        return json.dumps(asdict(self) | {"changes": str(changes), "cwd": os.getcwd()})

    @classmethod
    def prepare(
        cls, script: str, args: Sequence[str], changes: Path, *visible: Path
    ) -> "Overlay | None":
        """Return the overlay of the folders of a script and of its arguments, and of the home
        folder where that can be covered too.

        Args:
            script: The script.
            args: Its arguments.
            changes: Folder below which changes are kept, on a file system that can do that.
            visible: Folders that must stay visible, beside that one.

        Returns:
            None if the folders cannot be covered here.
        """
        visible_paths = [str(path.resolve()) for path in (changes, *visible, *caches())]
        temporary = os.path.realpath(tempfile.gettempdir())
        if not any(is_inside(path, (temporary,)) for path in user_folders(script, args)):
            visible_paths.append(temporary)
        for others in ((str(Path.home()),), ()):
            folders = user_folders(script, args, *others)
            overlay = cls(folders, tuple(path for path in visible_paths if os.path.isdir(path)))
            if overlay._works(changes / "try"):
                return overlay
        return None

    def _works(self, changes: Path) -> bool:
        """Return whether a process can cover the folders."""
        user = os.geteuid()
        owners = {os.stat(folder).st_uid for folder in self.folders}
        if not owners or (user and owners != {user}):
            return False  # files of others cannot be copied in a user namespace
        try:
            done = subprocess.run(
                python_command("-m", __name__, self.request(changes)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PREPARE_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def caches() -> list[Path]:
    """Return the folders of caches in the home folder."""
    return [Path.home() / name for name in CACHES]


def user_folders(script: str, args: Sequence[str], *others: str) -> tuple[str, ...]:
    """Return the folders of a script, of its arguments, the working directory, and others.

    An argument that names no file yet stands for the nearest folder above it. Folders inside
    others are left out.
    """
    paths = [os.getcwd(), os.path.dirname(os.path.abspath(script)), *others]
    for word in args:
        paths += [
            os.path.abspath(os.path.expanduser(text))
            for text in (word, word.partition("=")[2])
            if text and (os.sep in text or os.path.exists(text))
        ]
    found = set()
    for path in paths:
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        path = os.path.realpath(path)
        if path != "/" and not is_inside(path, SYSTEM_FOLDERS):
            found.add(path)
    return tuple(sorted(path for path in found if not is_inside(path, [*found - {path}])))


def is_inside(path: str, folders: Sequence[str]) -> bool:
    """Return whether a path is one of the folders, or in one of them."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def is_covered(folder: str) -> bool:
    """Return whether an overlay of Paceline is mounted at a folder in this process's namespace."""
    kind = ""
    with contextlib.suppress(OSError):
        for path, _, kind_there in mounts():
            if path == folder:  # the last one at a path is on top
                kind = kind_there
    return kind.startswith(f"overlay {NAME} ")


def mounts() -> Iterator[tuple[str, list[str], str]]:
    """Yield the path of each mount, its options, and its file system with source and options."""
    for line in MOUNTS.read_text(errors="surrogateescape").splitlines():
        place, _, kind = line.partition(" - ")
        words = place.split()
        # the kernel writes a space in a path as \040
        path = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4])
        yield path, words[5].split(","), kind


# In the process that covers


def cover(request: str, node: str = "0", *visible: Path) -> Path | None:
    """Cover the folders for this process, and for those that it starts later.

    Args:
        request: Value of ``VARIABLE``. Folders that do not exist on this node are left out.
        node: Number of this node: several may share the folder of the changes.
        visible: Further folders that stay as they are.

    Returns:
        Folder of changes that this process has created because the node does not share that of
        the launcher. ``remove_changes`` removes it. None if there is none.

    Raises:
        OSError: The folders cannot be covered.
    """
    fields = json.loads(request)
    changes = os.path.join(fields["changes"], node)
    made = _make_folder(Path(fields["changes"]))
    try:
        os.makedirs(changes, exist_ok=True)
        _enter_namespace()
        uncovered = [*fields["visible"], *map(os.path.realpath, visible)]
        paths = fields["folders"], uncovered
        folders, uncovered = (list(filter(os.path.isdir, each)) for each in paths)
        _cover(folders, uncovered, changes)
        os.chdir(fields["cwd"])  # the folder at the top of the overlay
    except OSError:
        remove_changes(made)
        raise
    return made


def remove_changes(made: Path | None) -> None:
    """Remove what ``cover`` has created, as far as possible. Nothing may use it any more."""
    if made is not None:
        with contextlib.suppress(OSError):
            remove_marked(made, CHANGES)


def _make_folder(changes: Path) -> Path | None:
    """Create the outermost missing folder above the changes, which is there on the launcher's
    node; return it.
    """
    missing = [folder for folder in changes.parents if not folder.exists()]
    if not missing:
        return None
    with Folder.make(missing[-1]) as folder:
        write_mark(folder.fd, CHANGES)
    return missing[-1]


def _enter_namespace() -> None:
    """Enter a mount namespace; as an ordinary user inside a user namespace with the same user."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", CLONE_NEWNS if uid == 0 else CLONE_NEWNS | CLONE_NEWUSER)
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def _cover(folders: Sequence[str], visible: Sequence[str], changes: str) -> None:
    """Mount the overlays, and what was mounted inside the folders on top of them."""
    inside = {
        path: "proc" if "ro" in options else kind.split()[0]  # or it can't be written
        for path, options, kind in mounts()
        if path not in folders and is_inside(path, folders)
    }
    visible_inside = [path for path in visible if is_inside(path, folders)]
    descriptors = {path: os.open(path, os.O_PATH) for path in (*inside, *visible_inside)}
    numbers = itertools.count()  # the same ones if ``changes`` has those of an earlier run
    for folder in folders:
        _mount_overlay(folder, changes, next(numbers))
    for path in sorted(inside, key=len):
        _bind(descriptors[path], path)
        if os.path.isdir(path) and inside[path] not in PSEUDO:
            _mount_overlay(path, changes, next(numbers))
    for path in visible_inside:
        _bind(descriptors[path], path)
    for descriptor in descriptors.values():
        os.close(descriptor)


def _mount_overlay(folder: str, changes: str, number: int) -> None:
    upper, work = (os.path.join(changes, f"{number}", name) for name in ("upper", "work"))
    if not os.path.isdir(upper):
        os.makedirs(upper)
        os.makedirs(work)
        shutil.copystat(folder, upper)
    parts = [f"lowerdir={_escaped(folder)}", f"upperdir={_escaped(upper)}"]
    parts += [f"workdir={_escaped(work)}"]
    parts += ["userxattr"] if os.geteuid() else ["redirect_dir=on"]
    data = ",".join(parts).encode(errors="surrogateescape")
    name = NAME.encode()
    _call("mount", name, folder.encode(errors="surrogateescape"), b"overlay", 0, data)


def _bind(descriptor: int, path: str) -> None:
    source = f"/proc/self/fd/{descriptor}".encode()
    _call("mount", source, path.encode(errors="surrogateescape"), None, MS_BIND | MS_REC, None)


def _escaped(path: str) -> str:
    return re.sub(r"([\\:,])", r"\\\1", path)


def _call(name: str, *args: object) -> None:
    """Call a function of the C library.

    Raises:
        OSError: It failed.
    """
    library = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in args]
    if getattr(library, name)(*values) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        cover(sys.argv[1])
    except OSError as error:
        sys.exit(f"paceline: the folders of the script cannot be covered: {error}")
