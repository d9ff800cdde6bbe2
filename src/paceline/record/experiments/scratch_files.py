"""Copy on write for the files of the user, with the functions of ``os`` that create, change or
remove them.

Written files lie in a scratch folder at the same path below ``files``, and removed ones have a mark
at the same path below ``removed``. Both are shared by all ranks of a node. Nothing outside of the
scratch folder changes.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

MAX_SHARE_OF_FREE_SPACE = 0.5  # a file above this share of the free space is not copied
PART_SUFFIX = ".paceline-part"  # of a copy that is not complete
MAX_LINKS = 40  # symbolic links that are followed, as in Linux

# The functions of ``os`` before they are redirected.
_os = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}


class ScratchFiles:
    """The files that a script has written, changed or removed so far.

    Paths are absolute. ``stop`` is called with a reason if a file cannot be copied; it does not
    return.
    """

    def __init__(self, folder: str, stop: Callable[[str], Any]) -> None:
        self._files, self._removed = os.path.join(folder, "files"), os.path.join(folder, "removed")
        self._stop = stop

    @property
    def is_touched(self) -> bool:
        """Whether any file was written, changed or removed."""
        return _exists(self._files) or _exists(self._removed)

    # Where files are

    def copy_of(self, path: str) -> str:
        """Return where the copy of a file is, or would be."""
        return self._files + path

    def has_copy(self, path: str) -> bool:
        return _exists(self._files + path)

    def is_removed(self, path: str) -> bool:
        """Return whether the script has removed an original file or a folder above it."""
        if not _exists(self._removed):
            return False
        while path != "/":
            if _exists(f"{self._removed}{path}.removed"):
                return True
            path = os.path.dirname(path)
        return False

    def has_original(self, path: str) -> bool:
        return _exists(path) and not self.is_removed(path)

    def exists(self, path: str) -> bool:
        return self.has_copy(path) or self.has_original(path)

    def to_read(self, path: str, links: int = 0) -> str:
        """Return the path at which the present content of a file is."""
        copy = self.copy_of(path)
        if _exists(self._files):  # something was written so far
            if _exists(copy):
                if links < MAX_LINKS and os.path.islink(copy):  # maybe to an original file
                    target = os.path.join(os.path.dirname(path), _os["readlink"](copy))
                    return self.to_read(os.path.normpath(target), links + 1)
                return copy
            if not _exists(path):
                return self._through_folder_link(path, links)
        return copy if self.is_removed(path) else path

    def _through_folder_link(self, path: str, links: int) -> str:
        """Return the path if a folder above it is a symbolic link that the script has created."""
        folder = os.path.dirname(path)
        while folder != "/" and links < MAX_LINKS:
            copy = self.copy_of(folder)
            if os.path.islink(copy):
                target = os.path.join(os.path.dirname(folder), _os["readlink"](copy))
                rest = os.path.relpath(path, folder)
                return self.to_read(os.path.normpath(os.path.join(target, rest)), links + 1)
            folder = os.path.dirname(folder)
        return path

    def to_write(self, path: str, keeps: bool) -> str:
        """Return the path to open for writing; the content is there if ``keeps``.

        It is the path of the original if that is a folder, or its folder does not exist, so that
        opening it fails.
        """
        copy = self.copy_of(path)
        if os.path.lexists(copy):
            return self.to_read(path)
        folder = os.path.dirname(path)
        if os.path.isdir(path) or not os.path.isdir(self.to_read(folder)):
            return path
        _os["makedirs"](os.path.dirname(copy), exist_ok=True)
        if keeps and self.has_original(path):
            self._copy(path, copy)
        return copy

    def _copy(self, path: str, copy: str) -> None:
        size = os.path.getsize(path)
        free = shutil.disk_usage(os.path.dirname(copy)).free
        if size > MAX_SHARE_OF_FREE_SPACE * free:
            self._stop(
                f"{path} would have been changed, and its {size / 1e9:.3g} GB are too many to copy "
                f"to {os.path.dirname(self._files)} (TMPDIR), which has {free / 1e9:.3g} GB free"
            )
        own = f"{copy}.{os.getpid()}{PART_SUFFIX}"  # another rank may copy it at the same time
        shutil.copy2(path, own)
        try:
            _os["link"](own, copy)
        except FileExistsError:
            pass
        finally:
            _os["unlink"](own)

    # The functions of ``os``

    def remove(self, path: str) -> None:
        """Remove a file."""
        if not self.exists(path) or (
            os.path.isdir(self.to_read(path)) and not os.path.islink(path)
        ):
            kind = errno.EISDIR if self.exists(path) else errno.ENOENT
            raise OSError(kind, os.strerror(kind), path)
        if os.path.lexists(self.copy_of(path)):
            _os["unlink"](self.copy_of(path))
        self._mark_removed(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        if self.exists(path) and self.names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if self.has_copy(path):
            _os["rmdir"](self.copy_of(path))
        elif not self.has_original(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._mark_removed(path)

    def _mark_removed(self, path: str) -> None:
        if os.path.lexists(path):
            mark = f"{self._removed}{path}.removed"
            _os["makedirs"](os.path.dirname(mark), exist_ok=True)
            _os["close"](_os["open"](mark, os.O_CREAT | os.O_WRONLY))

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """Create a folder."""
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if not os.path.isdir(self.to_read(os.path.dirname(path))):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        _os["makedirs"](os.path.dirname(self.copy_of(path)), exist_ok=True)
        _os["mkdir"](self.copy_of(path), mode)

    def move(self, source: str, target: str, moves_out: bool, moves_in: bool) -> None:
        """Move a file.

        Args:
            source, target: Absolute paths.
            moves_out: Whether ``source`` is a file of the user.
            moves_in: Whether ``target`` is one.
        """
        start = source
        if moves_out:
            if not self.exists(source):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
            if os.path.isdir(source) and not self.is_removed(source):
                self._stop(f"the folder {source} would have been moved")
            start = self.copy_of(source)
            if not os.path.lexists(start):
                start = self.to_write(source, keeps=True)
        end = target
        if moves_in:
            end = self.copy_of(target)
            if not os.path.isdir(self.to_read(os.path.dirname(target))):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target)
            _os["makedirs"](os.path.dirname(end), exist_ok=True)
        try:
            _os["replace"](start, end)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copy2(start, end)
            _os["unlink"](start)
        if moves_out:
            self._mark_removed(source)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder; of originals and copies together."""
        copy = self.copy_of(path)
        found = {}
        if os.path.isdir(copy):
            found = {name: None for name in _os["listdir"](copy) if not name.endswith(PART_SUFFIX)}
        if self.has_original(path) or not found:
            for name in _os["listdir"](path if self.has_original(path) else copy):
                if name not in found and self.has_original(os.path.join(path, name)):
                    found[name] = None
        return list(found)

    def entries(self, path: str) -> "Entries":
        """Return the entries of a folder, as ``os.scandir`` does."""
        copy = self.copy_of(path)
        found: dict[str, os.DirEntry[str]] = {}
        for folder in (copy, path):
            if not os.path.isdir(folder):
                continue
            with _os["scandir"](folder) as entries:
                found = {entry.name: entry for entry in entries} | found
        return Entries(found[name] for name in self.names(path) if name in found)


class Entries:
    """What ``os.scandir`` returns: an iterator that can be used in a ``with`` statement."""

    def __init__(self, entries: Iterator["os.DirEntry[str]"]) -> None:
        self._entries = entries

    def __iter__(self) -> "Entries":
        return self

    def __next__(self) -> "os.DirEntry[str]":
        return next(self._entries)

    def __enter__(self) -> "Entries":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _exists(path: str) -> bool:
    try:
        _os["lstat"](path)
    except OSError:
        return False
    return True
