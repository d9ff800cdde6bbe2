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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .imports import after_import

WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
# Of whom the audit hook tells that something goes: which arguments are paths.
CHANGES = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
    "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
}


class Scratch:
    """stop: is told what would have happened to which file, and does not return."""

    def __init__(self, folder: Path, stop: Callable[[str], Any]) -> None:
        self.folder, self._stop = folder, stop
        home = Path.home()
        # Caches, and what belongs to nobody; but not where the script itself is at home.
        places = map(str, (folder, tempfile.gettempdir(), home / ".cache", home / ".triton"))
        self._free = (*(os.path.realpath(one) for one in places), "/dev", "/proc", "/sys", "/run")
        own = (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))
        self._own = tuple(os.path.realpath(one) for one in own)

    def install(self) -> None:
        """For the rest of this process and the processes that it starts by forking."""
        sys.addaudithook(self._audit)
        io.open = builtins.open = self._redirected(builtins.open, writes=_mode_writes)
        os.open = self._redirected(os.open, writes=_flags_write)
        for name in ("mkdir", "makedirs"):
            setattr(os, name, self._redirected(getattr(os, name), writes=lambda *_, **__: True))
        after_import({"torch.serialization": self._saves})

    def place(self, path: Any, writes: bool) -> Any:
        """Where a file really is, or is to be made."""
        if not isinstance(path, str | bytes | os.PathLike):
            return path  # an open file
        whole = os.path.abspath(os.fsdecode(path))
        if os.path.exists(whole) or self._is_free(whole):
            return path
        inside = os.path.join(self.folder, whole.lstrip("/"))
        if writes:
            _original_makedirs(os.path.dirname(inside), exist_ok=True)
        return inside if writes or os.path.exists(inside) else path

    def _is_free(self, whole: str) -> bool:
        real = os.path.realpath(whole)
        if _within(real, (os.path.realpath(self.folder),)) or whole.endswith(".pyc"):
            return True
        return _within(real, self._free) and not _within(real, self._own)

    def _redirected(self, function: Callable[..., Any], writes: Callable[..., bool]) -> Any:
        @functools.wraps(function)
        def redirected(path: Any, *args: Any, **options: Any) -> Any:
            return function(self.place(path, writes(*args, **options)), *args, **options)

        return redirected

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
            if isinstance(flags, int) and flags & WRITES:
                self._refuse(path, "written")
        elif event in CHANGES:
            for at in CHANGES[event]:
                self._refuse(args[at], "changed or removed")

    def _refuse(self, path: Any, what: str) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        whole = os.path.abspath(os.fsdecode(path))
        if not self._is_free(whole) and os.path.lexists(whole) and not os.path.isdir(whole):
            self._stop(f"{whole} would have been {what}")


def _within(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)


_original_makedirs = os.makedirs


def _mode_writes(mode: str = "r", *_: Any, **__: Any) -> bool:
    return any(sign in mode for sign in "wax+")


def _flags_write(flags: int, *_: Any, **__: Any) -> bool:
    return bool(flags & WRITES)
