"""Protect the user's files while a script runs as an experiment.

New files are redirected to a scratch folder, at the same path below it, and are found there when
the script opens them again. If the script opens an existing file for writing, or moves or
removes one, an audit hook stops the experiment before that happens. The hook does not see files
that native code opens; ``torch.save`` is redirected for that reason.
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
# By audit event: positions of the arguments that are paths, each with the position of the file
# descriptor of the folder that the path is relative to.
PATH_ARGUMENTS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, None),),
}


class _ResolvingFlag(threading.local):
    """Whether this thread is resolving a path, whose own file operations are not redirected."""

    active = False


# Functions of ``os``, by what they do with a path.
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
    """The redirection of new files to ``folder``, and the audit hook that protects existing ones.

    ``stop`` is called with a description of what would have happened to which file. It does not
    return.
    """

    def __init__(self, folder: Path, stop: Callable[[str], Any]) -> None:
        self.folder, self._stop = folder, stop
        home = Path.home()
        # Caches and temporary files may be written, but not in the folders of the script.
        folders = map(str, (folder, tempfile.gettempdir(), home / ".cache", home / ".triton"))
        self._writable = (
            *(os.path.realpath(one) for one in folders),
            "/dev",
            "/proc",
            "/sys",
            "/run",
        )
        script_folders = (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))
        self._script_folders = tuple(os.path.realpath(one) for one in script_folders)
        self._resolving = _ResolvingFlag()
        self.is_disabled = False  # set when nothing of the script runs any more

    def install(self) -> None:
        """Start the protection, for this process and those that it forks. It cannot be removed."""
        sys.addaudithook(self._audit)
        io.open = builtins.open = self._redirected(builtins.open, writes=_mode_writes)
        os.open = self._redirected(os.open, writes=_flags_write)
        for name in CREATING_FUNCTIONS:
            setattr(os, name, self._redirected(getattr(os, name), writes=lambda *_, **__: True))
        for name in READING_FUNCTIONS:
            setattr(os, name, self._redirected(getattr(os, name), writes=lambda *_, **__: False))
        for name in MOVING_FUNCTIONS:
            setattr(os, name, self._redirected_move(getattr(os, name)))
        after_import({"torch.serialization": self._redirect_saves})

    def redirect(self, path: Any, writes: bool) -> Any:
        """Return the path that replaces ``path`` for a read or a write."""
        if not isinstance(path, str | bytes | os.PathLike) or self._resolving.active:
            return path  # an open file, or an access by this class
        self._resolving.active = True
        try:
            return self._redirect(path, writes)
        finally:
            self._resolving.active = False

    def _redirect(self, path: Any, writes: bool) -> Any:
        absolute = os.path.abspath(os.fsdecode(path))
        if _exists(absolute) or self._is_writable(absolute):
            return path
        copy = os.path.join(self.folder, absolute.lstrip("/"))
        if writes:
            _original_makedirs(os.path.dirname(copy), exist_ok=True)
        return copy if writes or _exists(copy) else path

    def _is_writable(self, absolute: str) -> bool:
        real = os.path.realpath(absolute)
        if _is_inside(real, (os.path.realpath(self.folder),)) or absolute.endswith(".pyc"):
            return True
        return _is_inside(real, self._writable) and not _is_inside(real, self._script_folders)

    def _redirected(self, function: Callable[..., Any], writes: Callable[..., bool]) -> Any:
        @functools.wraps(function)
        def redirected(*args: Any, **options: Any) -> Any:
            if not args or options.get("dir_fd") is not None:  # relative to another folder
                return function(*args, **options)
            path, *rest = args
            return function(self.redirect(path, writes(*rest, **options)), *rest, **options)

        return redirected

    def _redirected_move(self, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def redirected(source: Any, target: Any, **options: Any) -> Any:
            return function(self.redirect(source, False), self.redirect(target, True), **options)

        return redirected

    def _redirect_saves(self, module: Any) -> None:
        import torch

        original_save = module.save

        @functools.wraps(original_save)
        def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            if isinstance(f, str | os.PathLike) and os.path.exists(f):
                self._refuse(os.fspath(f), "written")
            original_save(obj, self.redirect(f, True), *args, **options)

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
        if self.is_disabled or not isinstance(path, str | bytes | os.PathLike):
            return
        base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
        absolute = os.path.normpath(os.path.join(base, os.fsdecode(path)))
        if not self._is_writable(absolute) and _exists(absolute) and not os.path.isdir(absolute):
            self._stop(f"{absolute} would have been {what}")


def _is_inside(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


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
