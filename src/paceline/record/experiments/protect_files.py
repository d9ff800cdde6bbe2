"""Files of the user's stay as they are while a script runs as an experiment.

New files go to a scratch folder, at their own path below it, and are found there again. Whoever
opens an existing file for writing, or moves or removes one, is stopped: an audit hook sees it
before it happens. What native code opens by itself it does not see; ``torch.save`` is redirected.
"""

import builtins
import functools
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..hooks.import_hooks import after_import

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
# Of what the audit hook is told: which arguments are paths, and which the folders (as open files)
# that they are relative to.
PATH_ARGUMENTS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, None),),
}


class _Looking(threading.local):
    """Whether this thread is looking where a path is."""

    set = False


# Of os, by what they do with a path; what is in scratch already is found there.
CREATING_FUNCTIONS = ("mkdir", "makedirs")
READING_FUNCTIONS = (
    "stat",
    "lstat",
    "listdir",
    "scandir",
    "access",
    "chmod",
    "utime",
    "unlink",
    "remove",
    "rmdir",
)
MOVING_FUNCTIONS = ("rename", "replace")


class FileProtection:
    """stop: is told what would have happened to which file, and does not return."""

    def __init__(self, folder: Path, stop: Callable[[str], Any]) -> None:
        self.folder, self._stop = folder, stop
        home = Path.home()
        # Caches, and what belongs to nobody; but not where the script itself is at home.
        places = map(str, (folder, tempfile.gettempdir(), home / ".cache", home / ".triton"))
        self._free = (*(os.path.realpath(one) for one in places), "/dev", "/proc", "/sys", "/run")
        own = (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))
        self._own = tuple(os.path.realpath(one) for one in own)
        self._looking = _Looking()
        self.over = False  # nothing of the script runs any more

    def install(self) -> None:
        """For the rest of this process and the processes that it starts by forking."""
        sys.addaudithook(self._audit)
        io.open = builtins.open = self._redirected(builtins.open, writes=_mode_writes)
        os.open = self._redirected(os.open, writes=_flags_write)
        for name in CREATING_FUNCTIONS:
            setattr(os, name, self._redirected(getattr(os, name), writes=lambda *_, **__: True))
        for name in READING_FUNCTIONS:
            setattr(os, name, self._redirected(getattr(os, name), writes=lambda *_, **__: False))
        for name in MOVING_FUNCTIONS:
            setattr(os, name, self._moved(getattr(os, name)))
        after_import({"torch.serialization": self._saves})

    def place(self, path: Any, writes: bool) -> Any:
        """Where a file really is, or is to be made."""
        if not isinstance(path, str | bytes | os.PathLike) or self._looking.set:
            return path  # an open file, or a look of our own
        self._looking.set = True
        try:
            return self._placed(path, writes)
        finally:
            self._looking.set = False

    def _placed(self, path: Any, writes: bool) -> Any:
        whole = os.path.abspath(os.fsdecode(path))
        if _exists(whole) or self._is_free(whole):
            return path
        inside = os.path.join(self.folder, whole.lstrip("/"))
        if writes:
            _original_makedirs(os.path.dirname(inside), exist_ok=True)
        return inside if writes or _exists(inside) else path

    def _is_free(self, whole: str) -> bool:
        real = os.path.realpath(whole)
        if _within(real, (os.path.realpath(self.folder),)) or whole.endswith(".pyc"):
            return True
        return _within(real, self._free) and not _within(real, self._own)

    def _redirected(self, function: Callable[..., Any], writes: Callable[..., bool]) -> Any:
        @functools.wraps(function)
        def redirected(*args: Any, **options: Any) -> Any:
            if not args or options.get("dir_fd") is not None:  # relative to another folder
                return function(*args, **options)
            path, *rest = args
            return function(self.place(path, writes(*rest, **options)), *rest, **options)

        return redirected

    def _moved(self, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def moved(source: Any, target: Any, **options: Any) -> Any:
            return function(self.place(source, False), self.place(target, True), **options)

        return moved

    def _saves(self, module: Any) -> None:
        import torch

        plain = module.save

        @functools.wraps(plain)
        def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            if isinstance(f, str | os.PathLike) and os.path.exists(f):
                self._refuse(os.fspath(f), "written")
            plain(obj, self.place(f, True), *args, **options)

        module.save = torch.save = save

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & WRITE_FLAGS:
                self._refuse(path, "written")
        elif event in PATH_ARGUMENTS:
            for at, folder in PATH_ARGUMENTS[event]:
                base = args[folder] if folder is not None else -1
                self._refuse(args[at], "changed or removed", base)

    def _refuse(self, path: Any, what: str, folder: int = -1) -> None:
        if self.over or not isinstance(path, str | bytes | os.PathLike):
            return
        base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
        whole = os.path.normpath(os.path.join(base, os.fsdecode(path)))
        if not self._is_free(whole) and _exists(whole) and not os.path.isdir(whole):
            self._stop(f"{whole} would have been {what}")


def _within(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)


_original_makedirs, _original_stat = os.makedirs, os.stat


def _exists(path: str) -> bool:
    try:
        _original_stat(path)
    except OSError:
        return False
    return True


def _mode_writes(mode: str = "r", *_: Any, **__: Any) -> bool:
    return any(sign in mode for sign in "wax+")


def _flags_write(flags: int, *_: Any, **__: Any) -> bool:
    return bool(flags & WRITE_FLAGS)
