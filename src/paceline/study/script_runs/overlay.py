"""Run a command in which folders of the user are covered by overlays.

An overlay (overlayfs) shows a folder, and keeps every change in another one: files stay as they
are whatever opens them, native code and other programs included. It is mounted in a mount
namespace of the command, for which an ordinary user needs a user namespace. Some systems forbid
these, and not every file system can be covered: ``Overlay.prepare`` finds out.

``python -P -m paceline.study.script_runs.overlay SPEC [COMMAND...]`` mounts, and then becomes the
command.
"""

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...record.experiments.rung import OVERLAY_NAME
from ...security.processes import python_command

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
# Folders that are never covered, with all that is in them.
SYSTEM_FOLDERS = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr"),
)
# File systems inside a covered folder that stay as they are: they hold no files of the user.
PSEUDO = {"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "debugfs", "bpf"}
FAILED = 125  # exit code if the folders cannot be covered
PREPARE_TIMEOUT_S = 30


@dataclass(frozen=True)
class Overlay:
    """Folders to cover.

    Attributes:
        folders: Folders to cover; none lies in another one.
        visible: Folders in them that stay as they are.
    """

    folders: tuple[str, ...]
    visible: tuple[str, ...]

    def command(self, scratch: Path, words: Sequence[str]) -> list[str]:
        """Return the command that runs ``words`` with changes going to ``scratch``.

        The changes of an earlier command with the same ``scratch`` are visible in it.
        """
        spec = asdict(self) | {"scratch": str(scratch), "cwd": os.getcwd()}
        return python_command("-m", __name__, json.dumps(spec), *words)

    @classmethod
    def prepare(
        cls, script: str, args: Sequence[str], visible: Path, *others: Path
    ) -> "Overlay | None":
        """Return the overlay of the folders of a script and of its arguments.

        Args:
            script: The script.
            args: Its arguments.
            visible: Folder of the experiments, which must stay visible.
            others: Further folders that must stay visible.

        Returns:
            None if the folders cannot be covered here.
        """
        home = Path.home()
        seen = [str(one.resolve()) for one in (visible, *others, home / ".cache", home / ".triton")]
        folders = user_folders(script, args)
        if os.geteuid() and any(os.stat(one).st_uid != os.geteuid() for one in folders):
            return None  # files of others cannot be copied in a user namespace
        found = cls(folders, tuple(one for one in seen if os.path.isdir(one)))
        scratch = visible / "try"
        try:
            done = subprocess.run(
                found.command(scratch, ()),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PREPARE_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return found if done.returncode == 0 and found.folders else None


def user_folders(script: str, args: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of a script, of its arguments, and the working directory.

    An argument that names no file yet stands for the nearest folder above it. Folders inside
    others are left out.
    """
    paths = [os.getcwd(), os.path.dirname(os.path.abspath(script))]
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
        if path != "/" and not any(_is_inside(path, one) for one in SYSTEM_FOLDERS):
            found.add(path)
    return tuple(sorted(a for a in found if not any(a != b and _is_inside(a, b) for b in found)))


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# In the process that becomes the command


def _enter_namespace() -> None:
    """Enter a mount namespace; as an ordinary user inside a user namespace with the same user."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", CLONE_NEWNS if uid == 0 else CLONE_NEWNS | CLONE_NEWUSER)
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def _cover(folders: Sequence[str], visible: Sequence[str], scratch: str) -> None:
    """Mount the overlays, and what was mounted inside the folders on top of them."""
    inside = {
        path: kind
        for path, kind in _mounts().items()
        if any(path != one and _is_inside(path, one) for one in folders)
    }
    kept = [one for one in visible if any(_is_inside(one, other) for other in folders)]
    opened = {path: os.open(path, os.O_PATH) for path in (*inside, *kept)}
    numbers = itertools.count()  # the same ones if ``scratch`` has the changes of an earlier run
    for folder in folders:
        _mount_overlay(folder, scratch, next(numbers))
    for path in sorted(inside, key=len):
        _bind(opened[path], path)
        if os.path.isdir(path) and inside[path] not in PSEUDO:
            _mount_overlay(path, scratch, next(numbers))
    for path in kept:
        _bind(opened[path], path)
    for descriptor in opened.values():
        os.close(descriptor)


def _mounts() -> dict[str, str]:
    """Return the type of file system at each mount point, without those that can't be written."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        place, _, kind = line.partition(" - ")
        words = place.split()
        path = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4])
        found[path] = "proc" if "ro" in words[5].split(",") else kind.split()[0]
    return found


def _mount_overlay(folder: str, scratch: str, number: int) -> None:
    upper, work = (os.path.join(scratch, f"{number}", name) for name in ("upper", "work"))
    if not os.path.isdir(upper):
        os.makedirs(upper)
        os.makedirs(work)
        shutil.copystat(folder, upper)
    parts = [f"lowerdir={_escaped(folder)}", f"upperdir={_escaped(upper)}"]
    parts += [f"workdir={_escaped(work)}"]
    parts += ["userxattr"] if os.geteuid() else ["redirect_dir=on"]
    data = ",".join(parts).encode(errors="surrogateescape")
    name = OVERLAY_NAME.encode()
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
    values = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in args]
    if getattr(library, name)(*values) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter(spec: str) -> None:
    """Cover the folders for this process. Exits with ``FAILED`` if that is not possible."""
    told = json.loads(spec)
    try:
        os.makedirs(told["scratch"], exist_ok=True)
        _enter_namespace()
        _cover(told["folders"], told["visible"], told["scratch"])
        os.chdir(told["cwd"])  # the folder at the top of the overlay
    except OSError as error:
        sys.stderr.write(f"paceline: the folders of the script cannot be covered: {error}\n")
        sys.exit(FAILED)


def _main(spec: str, *words: str) -> None:
    enter(spec)
    if words:
        os.execv(words[0], words)


if __name__ == "__main__":
    _main(*sys.argv[1:])
