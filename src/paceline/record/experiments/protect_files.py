"""Stop a script that runs as an experiment before it changes files of the user.

An overlay covers the folders of the user where the system allows it (security/overlay.py): nothing
is stopped there. An audit hook watches all other folders. It sees Python's functions;
``NATIVE_WRITERS`` are functions of libraries that open a path in native code, where it does not
see them. Other native code is not seen.
"""

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...security.overlay import caches, is_covered, is_inside
from ..hooks.taps import Tap, around

RECORD = "PACELINE_RECORD"  # environment variable: folder of the record
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
SYSTEM_FOLDERS = ("/dev", "/proc", "/sys", "/run")
# By audit event: positions of the paths that change, each with the position of the file descriptor
# of the folder that it is relative to.
EXISTING: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
}
CREATED = {"os.mkdir": (0, 2), "os.link": (1, 3), "os.symlink": (1, 2)}  # the same, one for each
# Functions of libraries, with the position and the name of their path.
NATIVE_WRITERS = (
    (Tap("torch.serialization", "save", is_optional=True), 1, "f"),
    (Tap("safetensors.torch", "save_file", is_optional=True), 1, "filename"),
    (Tap("safetensors.numpy", "save_file", is_optional=True), 1, "filename"),
    (Tap("cv2", "imwrite", is_optional=True), 0, "filename"),
    (Tap("pyarrow.parquet", "write_table", is_optional=True), 1, "where"),
)
KEPT_FILES_HINT = (
    "let the script write to the folder of temporary files (TMPDIR). Where overlays can be "
    "mounted, it may also write to its working directory and to folders that its arguments name"
)


class FileProtection:
    """The audit hook that protects the files of the user in this process.

    Args:
        stop: Called with a description of what would have happened to which file. It does not
            return.
        covered: Folders in which everything may be written, because an overlay covers them. Those
            that this process does not see through an overlay are protected as others are.
        own: Folder of Paceline's own files, beside the record.
    """

    def __init__(self, stop: Callable[[str], Any], covered: Sequence[str], own: str) -> None:
        self._stop = stop
        self._free = (
            *(os.path.realpath(folder) for folder in (own, os.environ.get(RECORD)) if folder),
            *(os.path.realpath(folder) for folder in covered if is_covered(folder)),
        )
        # Caches and temporary files may be written, but not in the folders of the script.
        folders = (tempfile.gettempdir(), *map(str, caches()))
        self._writable = (*(os.path.realpath(folder) for folder in folders), *SYSTEM_FOLDERS)
        script_folders = (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))
        self._script_folders = tuple(map(os.path.realpath, script_folders))
        self._opening = threading.local()  # folder: descriptor that the path is relative to
        self.is_disabled = False  # set when nothing of the script runs any more

    def install(self) -> None:
        """Start the protection, for this process and those that it forks. It cannot be removed."""
        sys.addaudithook(self._audit)
        around(os, "open", self._open)
        for tap, position, keyword in NATIVE_WRITERS:
            tap.before(functools.partial(self._check_native, position, keyword))
        Tap("h5py._hl.files", "File.__init__").before(self._check_h5py)

    def _open(
        self, function: Callable[..., int], *args: Any, dir_fd: int | None = None, **options: Any
    ) -> int:
        """Call ``os.open``, and note ``dir_fd``, which its audit event does not have."""
        self._opening.folder = -1 if dir_fd is None else dir_fd
        try:
            return function(*args, dir_fd=dir_fd, **options)
        finally:
            self._opening.folder = -1

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_disabled:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & WRITE_FLAGS:
                self._check_write(path, folder=getattr(self._opening, "folder", -1))
        elif event == "sqlite3.connect":
            self._check_database(args[0])
        elif event in EXISTING:
            paths = [
                _absolute(args[at], -1 if folder is None else args[folder])
                for at, folder in EXISTING[event]
            ]
            if paths[0] and os.path.lexists(paths[0]):
                for path in paths:
                    self._refuse(path, "changed or removed")
        elif event in CREATED:
            at, folder = CREATED[event]
            path = _absolute(args[at], args[folder])
            if not os.path.lexists(path):
                self._refuse(path, "created")

    def _check_write(self, path: Any, what: str = "written", folder: int = -1) -> None:
        """Stop before a file is opened for writing."""
        absolute = _absolute(path, folder)
        if not os.path.isdir(absolute):
            self._refuse(absolute, what)

    def _check_database(self, name: Any) -> None:
        if isinstance(name, str) and name.startswith("file:"):
            name = "" if "mode=ro" in name or "mode=memory" in name else name[5:].partition("?")[0]
        if name and name not in (":memory:", b":memory:"):
            self._check_write(name, "opened for writing")

    def _refuse(self, absolute: str, what: str) -> None:
        """Stop before something happens to a path, if it is one of the user's."""
        folder, name = os.path.split(absolute)
        if not os.path.isdir(folder) or "__pycache__" in absolute.split(os.sep):
            return  # the function fails, or changes no file of the user
        places = {os.path.realpath(absolute), os.path.join(os.path.realpath(folder), name)}
        if not all(self._is_writable(place) for place in places):
            what = what if os.path.lexists(absolute) else "created"
            self._stop(f"{absolute} would have been {what}")

    def _is_writable(self, place: str) -> bool:
        if is_inside(place, self._free):
            return True
        return is_inside(place, self._writable) and not is_inside(place, self._script_folders)

    # Native code

    def _check_native(self, position: int, keyword: str, *args: Any, **options: Any) -> None:
        if not self.is_disabled:
            self._check_write(options.get(keyword, (*args, *[None] * position)[position]))

    def _check_h5py(self, _: Any, name: Any, mode: str = "r", *args: Any, **options: Any) -> None:
        if mode != "r" and not self.is_disabled:
            self._check_write(name)


def _absolute(path: Any, folder: int = -1) -> str:
    """Return the absolute path, or "" for an open file.

    folder: Descriptor of the folder that it is relative to; -1: the working directory.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        return ""
    base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
    return os.path.normpath(os.path.join(base, os.fsdecode(path)))
