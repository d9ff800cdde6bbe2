"""Protect the user's files while a script runs as an experiment.

What the script writes, changes or removes is redirected to a scratch folder, where later accesses
find it (scratch_files.py). Redirected are Python's functions that take a path, and functions of
libraries that open a path natively (native_writers.py). An audit hook stops the experiment before
an existing file is changed in a way that is not redirected. It does not see files that other
native code opens: these are protected only in folders that an overlay covers
(study/script_runs/overlay.py).
"""

import builtins
import functools
import io
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...security.folders import Folder
from ...security.removal import remove_marked, write_mark
from ..hooks.import_hooks import after_import
from . import native_writers
from .rung import OVERLAY_NAME
from .scratch_files import ScratchFiles

SCRATCH = "scratch"  # kind of the scratch folder's mark
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
    is_paused = False  # for files of Paceline, which are not protected


# Functions of ``os`` that read the file or folder of a path, or its attributes.
READING_FUNCTIONS = (
    *("stat", "lstat", "access", "readlink", "chdir", "statvfs", "getxattr", "listxattr"),
)
# Functions that change attributes; nothing is done to original files and folders.
ATTRIBUTE_FUNCTIONS = ("chmod", "chown", "lchown", "utime", "setxattr", "removexattr")


class FileProtection:
    """The redirection to ``folder``, and the audit hook that protects existing files.

    Args:
        folder: The scratch folder.
        stop: Called with a description of what would have happened to which file. It does not
            return.
        covered: Folders in which everything may be written, because an overlay covers them. Those
            that this process does not see through an overlay are protected as others are.
    """

    def __init__(
        self, folder: Path, stop: Callable[[str], Any], covered: tuple[str, ...] = ()
    ) -> None:
        _make_scratch(folder)
        self._folder, self._stop = os.path.realpath(folder), stop
        self._files = ScratchFiles(self._folder, stop)
        home = Path.home()
        # Caches and temporary files may be written, but not in the folders of the script.
        folders = map(str, (tempfile.gettempdir(), home / ".cache", home / ".triton"))
        self._writable = (
            *(os.path.realpath(one) for one in folders),
            "/dev",
            "/proc",
            "/sys",
            "/run",
        )
        script_folders = (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))
        self._script_folders = tuple(os.path.realpath(one) for one in script_folders)
        self._covered = tuple(os.path.realpath(one) for one in covered if _is_covered(one))
        self._resolving = _ResolvingFlag()
        self.is_disabled = False  # set when nothing of the script runs any more

    def install(self) -> None:
        """Start the protection, for this process and those that it forks. It cannot be removed."""
        sys.addaudithook(self._audit)
        io.open = builtins.open = self._redirected(builtins.open, _opens)
        os.open = self._redirected(os.open, _opens_with_flags)
        for name in READING_FUNCTIONS:
            setattr(os, name, self._redirected(getattr(os, name), _reads))
        for name in ATTRIBUTE_FUNCTIONS:
            setattr(os, name, self._on_copies(getattr(os, name)))
        os.truncate = self._redirected(os.truncate, _changes)
        os.mkdir = self._replaced(os.mkdir, self._files.make_folder)
        os.unlink = self._replaced(os.unlink, self._files.remove)
        os.remove = self._replaced(os.remove, self._files.remove)
        os.rmdir = self._replaced(os.rmdir, self._files.remove_folder)
        os.listdir = self._listing(os.listdir, self._files.names)
        os.scandir = self._listing(os.scandir, self._files.entries)
        os.rename, os.replace = self._moving(os.rename), self._moving(os.replace)
        os.link, os.symlink = self._linking(os.link), self._linking(os.symlink)
        shutil.rmtree = _remove_tree  # type: ignore[assignment]  # the original one avoids paths
        after_import(native_writers.hooks(self.redirect))

    def redirect(self, path: Any, writes: bool = False, keeps: bool = True) -> Any:
        """Return the path that replaces ``path`` for reading, or for writing.

        ``keeps``: the file's content is needed for writing.
        """
        own = self._protected(path)
        if own is None:
            return path
        return self._resolve(self._to_open, own, path, writes, keeps)

    def _to_open(self, own: str, path: Any, writes: bool, keeps: bool) -> Any:
        found = self._files.to_write(own, keeps) if writes else self._files.to_read(own)
        return path if found == own else found

    def _resolve(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function whose own file operations are not redirected."""
        self._resolving.active = True
        try:
            return function(*args)
        finally:
            self._resolving.active = False

    def _protected(self, path: Any) -> str | None:
        """Return the absolute path if it is one of the user's; None for others."""
        if self.is_disabled or self._resolving.active:
            return None  # an access by this class
        if not isinstance(path, str | bytes | os.PathLike):
            return None  # an open file
        return self._resolve(self._absolute, path)  # type: ignore[no-any-return]

    def _absolute(self, path: Any) -> str | None:
        absolute = os.path.abspath(os.fsdecode(path))
        folder, name = os.path.split(absolute)
        absolute = os.path.join(os.path.realpath(folder), name)
        return None if self._is_writable(absolute) else absolute

    def _is_writable(self, absolute: str) -> bool:
        real = os.path.realpath(absolute)
        if _is_inside(real, (self._folder, *self._covered)) or absolute.endswith(".pyc"):
            return True
        return _is_inside(real, self._writable) and not _is_inside(real, self._script_folders)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Redirect and protect nothing in this thread: for files of Paceline."""
        flag = self._resolving
        before, flag.active, flag.is_paused = flag.active, True, True
        try:
            yield
        finally:
            flag.active, flag.is_paused = before, False

    # Replacements of functions that take paths

    def _redirected(
        self, function: Callable[..., Any], access: Callable[..., tuple[bool, bool]]
    ) -> Callable[..., Any]:
        """Return a function that opens the redirected path.

        ``access`` returns from the other arguments whether the function writes, and whether it
        needs the content of the file.
        """

        @functools.wraps(function)
        def redirected(*args: Any, **options: Any) -> Any:
            if not args or options.get("dir_fd") is not None:  # relative to another folder
                return function(*args, **options)
            path, *rest = args
            return function(self.redirect(path, *access(*rest, **options)), *rest, **options)

        return redirected

    def _on_copies(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def changed(path: Any, *args: Any, **options: Any) -> Any:
            own = self._protected(path) if options.get("dir_fd") is None else None
            if own is None:
                return function(path, *args, **options)
            found = self._resolve(self._files.to_read, own)
            return None if found == own else function(found, *args, **options)

        return changed

    def _replaced(
        self, function: Callable[..., Any], instead: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def replaced(path: Any, *args: Any, **options: Any) -> Any:
            own = self._protected(path) if options.get("dir_fd") is None else None
            if own is None:
                return function(path, *args, **options)
            options.pop("dir_fd", None)
            return self._resolve(functools.partial(instead, own, *args, **options))

        return replaced

    def _listing(
        self, function: Callable[..., Any], instead: Callable[[str], Any]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def listed(path: Any = ".") -> Any:
            own = self._protected(path) if not isinstance(path, bytes) else None
            if own is None or self._resolve(self._is_untouched, own):
                return function(path)
            return self._resolve(instead, own)

        return listed

    def _is_untouched(self, own: str) -> bool:
        return self._files.has_original(own) and not self._files.is_touched

    def _moving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def moved(src: Any, dst: Any, **options: Any) -> Any:
            source, target = (self._protected(one) for one in (src, dst))
            if (source is None and target is None) or any(options.values()):
                return function(src, dst, **options)
            start, end = source or os.fsdecode(src), target or os.fsdecode(dst)
            return self._resolve(
                self._files.move, start, end, source is not None, target is not None
            )

        return moved

    def _linking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        hard = function is os.link

        @functools.wraps(function)
        def linked(src: Any, dst: Any, **options: Any) -> Any:
            source = self.redirect(src, writes=True) if hard else src
            return function(source, self.redirect(dst, True, False), **options)

        return linked

    # What is not redirected

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & WRITE_FLAGS and not flags & os.O_EXCL:
                self._refuse(path, "written")
        elif event == "sqlite3.connect":
            name = args[0]
            if isinstance(name, str) and name.startswith("file:") and "mode=ro" not in name:
                self._refuse(name[5:].partition("?")[0], "opened for writing")
        elif event in PATH_ARGUMENTS:
            for at, folder in PATH_ARGUMENTS[event]:
                base = args[folder] if folder is not None else -1
                self._refuse(args[at], "changed or removed", base)

    def _refuse(self, path: Any, what: str, folder: int = -1) -> None:
        if self.is_disabled or self._resolving.is_paused:
            return
        if not isinstance(path, str | bytes | os.PathLike):
            return
        before, self._resolving.active = self._resolving.active, True
        try:
            base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
            absolute = os.path.normpath(os.path.join(base, os.fsdecode(path)))
            is_file = os.path.lexists(absolute) and not os.path.isdir(absolute)
            if is_file and not self._is_writable(absolute):
                self._stop(f"{absolute} would have been {what}")
        finally:
            self._resolving.active = before


def _make_scratch(folder: Path) -> None:
    """Create the scratch folder, which all ranks of a node share, if it does not exist.

    Raises:
        UnsafeFileError: Another user has created it.
        OSError: It can't be created.
    """
    if not folder.parent.exists():  # on another node than the launcher's
        Folder.make(folder.parent, exist_ok=True).close()
    with Folder.make(folder, exist_ok=True) as made:
        if not made.names():
            write_mark(made.fd, SCRATCH)


def remove_scratch(folder: Path) -> None:
    """Remove the scratch folder and its parent, if that is empty. Never raises."""
    with suppress(OSError):
        remove_marked(folder, SCRATCH)
        folder.parent.rmdir()


_original_rmtree = shutil.rmtree


def _remove_tree(
    path: Any,
    ignore_errors: bool = False,
    onerror: Any = None,
    *,
    onexc: Any = None,
    dir_fd: int | None = None,
) -> None:
    """Remove a folder with its content, as ``shutil.rmtree`` does, by paths."""
    if dir_fd is not None:  # relative to an open folder, which is not redirected
        _original_rmtree(path, ignore_errors, onerror, dir_fd=dir_fd)
        return

    def call(function: Callable[[Any], Any], one: Any) -> Any:
        try:
            return function(one)
        except OSError as error:
            if onexc is not None:
                onexc(function, one, error)
            elif onerror is not None:
                onerror(function, one, sys.exc_info())
            elif not ignore_errors:
                raise
        return None

    for name in call(os.listdir, path) or ():  # another rank may have removed the folder
        inside = os.path.join(path, name)
        if os.path.isdir(inside) and not os.path.islink(inside):
            _remove_tree(inside, ignore_errors, onerror, onexc=onexc)
        else:
            call(os.unlink, inside)
    call(os.rmdir, path)


def _is_covered(folder: str) -> bool:
    """Return whether an overlay of Paceline is mounted at a folder in this process's namespace."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    for line in reversed(mounts):  # the last one at a path is on top
        place, _, kind = line.partition(" - ")
        if re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place.split()[4]) == folder:
            return kind.startswith(f"overlay {OVERLAY_NAME} ")
    return False


def _is_inside(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _opens(mode: str = "r", *_: Any, **__: Any) -> tuple[bool, bool]:
    return any(sign in mode for sign in "wax+"), "w" not in mode


def _opens_with_flags(flags: int, *_: Any, **__: Any) -> tuple[bool, bool]:
    return bool(flags & WRITE_FLAGS), not flags & os.O_TRUNC


def _reads(*_: Any, **__: Any) -> tuple[bool, bool]:
    return False, True


def _changes(*_: Any, **__: Any) -> tuple[bool, bool]:
    return True, True
