"""Lock of a folder that one run uses: checkpoints, records. It frees itself when the run has ended.

The lock is a file in the folder, because locks of the kernel (flock, fcntl) do not work between
the nodes of some shared file systems. A process of the run holds it and renews the file's time.
On the same node another run asks the kernel whether this process still exists. From other nodes,
the lock is free when its time was not renewed for ``EXPIRY_S``, by the clock of the file server.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .files import InvalidFileError, open_regular, read_regular
from .processes import kernel_id, start_ticks
from .schema import parse_json
from .text import printable

NAME = ".paceline-run.json"
RENEWAL_INTERVAL_S = 10.0
EXPIRY_S = 60.0
MAX_LOCK_BYTES = 4096
POLL_INTERVAL_S = 1.0
_PROCESS_RUN = secrets.token_hex(8)  # run id of a process that no launcher has given one


class FolderInUseError(ValueError):
    """Another run uses the folder."""


@dataclass
class Holder:
    """The process that holds a lock. An empty ``run`` is a file that can't be read.

    Attributes:
        run: ID of the run.
        host: Name of the node.
        system: ID of the node's kernel and of the process's PID namespace.
        pid: PID in this namespace.
        started: Start time of the process, in clock ticks since the start of the node.
    """

    run: str = ""
    host: str = ""
    system: str = ""
    pid: int = 0
    started: int = 0


class RunLock:
    """The lock of one folder, for one run."""

    def __init__(
        self, folder: Path, use: str, run: str = "", *, name: str = NAME, way_out: str = ""
    ) -> None:
        """Describe the lock; ``acquire`` takes it.

        Args:
            folder: An existing folder that can be written to.
            use: What is in the folder, e.g. "checkpoint", for messages.
            run: ID of the run. "": the run is this process.
            name: Name of the lock's file; locks of different names do not exclude each other.
            way_out: What a user can do if another run has the lock. "": choose another folder.
        """
        self._path, self._use = folder / name, use
        self._way_out = way_out or (
            "choose another folder, or wait until that run has ended. If both runs shall use this "
            f"folder: rm {self._path}"
        )
        self._own = Holder(
            run or _PROCESS_RUN,
            socket.gethostname(),
            kernel_id("pid"),
            os.getpid(),
            start_ticks(os.getpid()) or 0,
        )
        self._ended = threading.Event()

    def acquire(self, say: Callable[[str], None]) -> None:
        """Take the lock; wait up to ``EXPIRY_S`` for a run on another node to prove that it runs.

        Args:
            say: Function that prints why this call waits.

        Raises:
            FolderInUseError: Another run has it.
            OSError: The lock can't be written.
        """
        before = None  # when the holder had renewed it at the last look
        while (found := self._look()) is not None:
            content, renewed, now = found
            holder = self._parse(content)
            alive = self._is_alive(holder)
            if alive is None and before not in (None, renewed):
                alive = True
            elif alive is None and now - renewed >= EXPIRY_S:
                alive = False
            if alive:
                raise self._in_use(holder)
            if alive is False:
                self._set_aside(content)
                break
            if before is None:
                say(
                    f"the {self._use} folder {self._path.parent} was used by "
                    f"{self._describe(holder)}; Paceline waits up to {EXPIRY_S:.0f} s to see "
                    "whether that run has ended"
                )
            before = renewed
            time.sleep(POLL_INTERVAL_S)
        self._create()

    def check(self) -> None:
        """Raise FolderInUseError if another run, of which a process runs on this node, has it."""
        found = self._look()
        holder = self._parse(found[0]) if found is not None else Holder()
        if holder.run not in ("", self._own.run) and self._is_alive(holder):
            raise self._in_use(holder)

    def keep(self, warn: Callable[[str], None]) -> None:
        """Renew the lock in a background thread until ``release``.

        Args:
            warn: Function that prints that another run has taken the lock.
        """
        threading.Thread(
            target=self._renew, args=(warn,), daemon=True, name="paceline-lock"
        ).start()

    def release(self) -> None:
        """Remove the lock if this process holds it. Never raises."""
        self._ended.set()
        with contextlib.suppress(OSError, InvalidFileError):
            if self._parse(read_regular(self._path, MAX_LOCK_BYTES)) == self._own:
                self._path.unlink()

    def _renew(self, warn: Callable[[str], None]) -> None:
        while not self._ended.wait(RENEWAL_INTERVAL_S):
            try:
                fd = open_regular(self._path, os.O_RDWR, follow_links=False)
            except FileNotFoundError:
                return  # the user has removed it
            except OSError:
                continue  # the file server does not answer
            try:
                holder = self._parse(os.read(fd, MAX_LOCK_BYTES))
                if holder != self._own:
                    if not self._ended.is_set():
                        warn(
                            f"the {self._use} folder {self._path.parent} is now also used by "
                            f"{self._describe(holder)}"
                        )
                    return
                os.utime(fd)
            except OSError:
                continue
            finally:
                os.close(fd)

    def _look(self) -> tuple[bytes, float, float] | None:
        """Return the content of the lock, when it was renewed, and the time now, both by the clock
        of the file server; None if there is no lock.
        """
        probe = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd = open_regular(probe, flags, follow_links=False, mode=0o666)
        try:
            now = os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            probe.unlink()
        try:
            fd = open_regular(self._path, follow_links=False)
        except FileNotFoundError:
            return None
        try:
            return os.read(fd, MAX_LOCK_BYTES), os.fstat(fd).st_mtime, now
        finally:
            os.close(fd)

    def _is_alive(self, holder: Holder) -> bool | None:
        """Return whether the holder still uses the folder; None if only time can show it."""
        if holder.system == self._own.system and holder.system:
            started = start_ticks(holder.pid)
            if holder.pid == os.getpid() or started is None:
                return False
            return started == holder.started
        # An earlier attempt of the same run: its launcher has ended it.
        return False if holder.run == self._own.run else None

    def _set_aside(self, content: bytes) -> None:
        """Remove the lock of a run that has ended. Raises FolderInUseError if another run was
        faster.
        """
        aside = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}.tmp")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        found = read_regular(aside, MAX_LOCK_BYTES)
        if found != content:
            with contextlib.suppress(OSError):
                os.link(aside, self._path)
            aside.unlink()
            raise self._in_use(self._parse(found))
        aside.unlink()

    def _create(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = open_regular(self._path, flags, follow_links=False, mode=0o666)
        except FileExistsError:
            found = self._look()
            raise self._in_use(self._parse(found[0] if found else b"")) from None
        try:
            os.write(fd, json.dumps(asdict(self._own)).encode())
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(fd)

    def _parse(self, content: bytes) -> Holder:
        try:
            return parse_json(content, Holder, self._path)
        except InvalidFileError:
            return Holder()  # another run is just writing it

    def _in_use(self, holder: Holder) -> FolderInUseError:
        return FolderInUseError(
            f"the {self._use} folder {self._path.parent} is in use by {self._describe(holder)}. "
            f"HINT: {self._way_out}"
        )

    def _describe(self, holder: Holder) -> str:
        if not holder.run:
            return "another run"
        return printable(f"run {holder.run} (process {holder.pid} on {holder.host})")
