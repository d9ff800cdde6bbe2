"""Hosts in Linux namespaces: the login host host0 and host1 to hostN, started by hosts.sh."""

import fcntl
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from . import inside
from .needs import PRIVATE, hidden

HERE = Path(__file__).parent
PARENT = Path("/var/tmp")  # shared by all hosts
PREFIX = "paceline-bed-"
CACHES = "torchinductor_"  # cache folder that importing PyTorch creates and does not remove


class Guest(Protocol):
    """A service that runs on the hosts during all tests, such as Slurm."""

    def leave(self) -> None: ...  # end the jobs of a test
    def heal(self) -> None: ...  # repair the service after the hosts are restored


class Hosts:
    """The hosts of the test cluster. ``restore`` resets their state between tests."""

    def __init__(self, number: int = 4) -> None:
        self.names = [f"host{i}" for i in range(number + 1)]
        self.guests: list[Guest] = []
        self._started: list[subprocess.Popen[str]] = []
        self.root, lock = _new_folder()
        self.folder = self.root / "shared"
        self.folder.mkdir()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the hosts are
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "bash", HERE / "hosts.sh", self.root, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C must reach the tests only; they end this process
            pass_fds=[lock],
            env={**os.environ, "SEEN": "\n".join(hidden())},
        )
        os.close(lock)
        self._answer("coming up")
        self.ssh = self.root / "ssh"  # ssh_config, known_hosts, authorized_keys, id: tests may edit
        self._written = {path: path.read_bytes() for path in self._files()}
        self.settle()

    def close(self) -> None:
        self._keeper.stdin.close()
        self._keeper.wait(timeout=30)

    def address(self, name: str) -> str:
        return "10.77.0.100" if name == "host0" else f"10.77.0.{name.removeprefix('host')}"

    def dead_address(self, name: str) -> str:
        """Return the host's address on the second network, which reaches no host."""
        return self.address(name).replace("10.77", "10.78")

    def new_folder(self) -> Path:
        """Create a folder that all hosts share."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def first(self, name: str) -> int:
        """Return the PID, on this machine, of a host's first process."""
        return int((self.root / name / "pid").read_text())

    def start(
        self,
        name: str,
        *command: object,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a process in the host, with ``options`` of Popen.

        stdout and stderr are pipes by default. The process leads a session, so that
        ``os.killpg(process.pid, SIGINT)`` has the effect of Ctrl-C.
        """
        words = [str(word) for word in command]
        made = inside.start(self.first(name), words, cwd or self.folder, env or {}, **options)
        self._started = [one for one in self._started if one.poll() is None] + [made]
        return made

    def run(
        self,
        name: str,
        *command: object,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 120,
        check: bool = True,
        input: str | None = None,  # noqa: A002 - same name as in subprocess.run
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host and wait; with ``check``, a failure shows the whole output."""
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        process = self.start(name, *command, cwd=cwd, env=env, stdin=stdin)
        try:
            out, err = process.communicate(input, timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            said = [(part or b"").decode(errors="replace") for part in (error.output, error.stderr)]
            text = "\n".join([f"not done in {timeout} s: {command}", *said])
            raise AssertionError(text) from None
        result = subprocess.CompletedProcess(command, process.returncode, out, err)
        if check and result.returncode:
            raise AssertionError(f"exit code {result.returncode}: {command}\n{out}\n{err}")
        return result

    def link(self, name: str, up: bool) -> None:
        """Connect or disconnect a host's network link; without it, packets are dropped."""
        self._ask(f"link {name} {'up' if up else 'down'}")

    def crash(self, name: str) -> None:
        """End all processes of a host at once; connections to it break.

        If its link was disconnected before, this simulates a power failure: other hosts get no
        notification.
        """
        self._ask(f"crash {name}")

    def boot(self, name: str) -> None:
        """Start a host after a crash, with an empty /tmp. ``restore`` restarts the services."""
        self._ask(f"boot {name}")
        self.settle(name)

    def up(self, name: str) -> bool:
        return (self.root / name / "pid").exists()

    def second_network(self, *names: str, listed_in: list[str] | None = None) -> None:
        """Give hosts (default: all) a second interface eth1 that drops all packets silently.

        The interface is up and has the address ``dead_address``. In /etc/hosts of the hosts
        ``listed_in``, the names refer to these addresses.
        """
        for name in names or self.names:
            self._ask(f"second {name} on")
            for reader in listed_in or []:
                path = self.root / reader / "hosts"
                text = path.read_text()
                path.write_text(  # not replaced, because the file itself is mounted
                    text.replace(
                        f"{self.address(name)} {name}\n", f"{self.dead_address(name)} {name}\n"
                    )
                )

    def one_network(self) -> None:
        """Remove the second network."""
        for name in self.names:
            self._ask(f"second {name} off")
            self._write_back(self.root / name / "hosts")

    def left_over(self, seconds: float = 2.0) -> list[str]:
        """Return leftovers of a test: processes in any host, and files in /tmp, /dev/shm, /run.

        Some processes need a moment to end: the check is repeated for up to ``seconds`` until
        nothing is left.
        """
        deadline = time.monotonic() + seconds
        while True:
            running, files = self._new()
            left = [f"{host}: {pid} {line}" for (host, pid, _), line in running.items()]
            left += [f"{host}: {path}" for host, path in files]
            if not left or time.monotonic() > deadline:
                return sorted(left)
            time.sleep(0.05)

    def settle(self, *names: str) -> None:
        """Exclude the present processes and files of hosts (default: all) from leftovers."""
        names = names or tuple(self.names)
        firsts = {name: self.first(name) for name in names}
        if set(names) == set(self.names):
            self._running, self._lying = set(), set()
        self._running |= set(inside.processes(firsts))
        self._lying = {entry for entry in self._lying if entry[0] not in names}
        self._lying |= self._files_in(firsts)

    def restore(self) -> None:
        """Restore the initial state: all hosts up, linked, on one network, without leftovers."""
        for guest in self.guests:
            guest.leave()
        for name in self.names:
            if not self.up(name):
                self.boot(name)
            self.link(name, True)
        self.one_network()
        for path in self._written:
            self._write_back(path)
        self._clean()
        for guest in self.guests:
            guest.heal()

    def _clean(self) -> None:
        running, files = self._new()
        for _, pid, _ in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for name, path in files:
            file = Path(f"/proc/{self.first(name)}/root{path}")
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file, ignore_errors=True)
            else:
                file.unlink(missing_ok=True)

    def _new(self) -> tuple[dict[tuple[str, int, str], str], set[tuple[str, str]]]:
        firsts = {name: self.first(name) for name in self.names if self.up(name)}
        running = inside.processes(firsts)
        new = {who: line for who, line in running.items() if who not in self._running}
        return new, self._files_in(firsts) - self._lying

    def _files_in(self, firsts: dict[str, int]) -> set[tuple[str, str]]:
        """Return the entries of each host's PRIVATE folders, without those of subfolders."""
        found = set()
        for name, first in firsts.items():
            for folder in PRIVATE:
                names = os.listdir(f"/proc/{first}/root{folder}")
                found |= {(name, f"{folder}/{f}") for f in names if not f.startswith(CACHES)}
        return found

    def _files(self) -> list[Path]:
        names = ("ssh_config", "known_hosts", "authorized_keys", "id")
        return [self.ssh / n for n in names] + [self.root / n / "hosts" for n in self.names]

    def _write_back(self, path: Path) -> None:
        if not path.exists() or path.read_bytes() != self._written[path]:
            path.write_bytes(self._written[path])

    def _ask(self, line: str) -> None:
        self._keeper.stdin.write(line + "\n")
        self._keeper.stdin.flush()
        self._answer(line)

    def _answer(self, line: str) -> None:
        # A crash is complete when the host's processes are gone; those that are children of this
        # process must be reaped here.
        while not select.select([self._keeper.stdout], [], [], 0.05)[0]:
            for process in self._started:
                process.poll()
        said = self._keeper.stdout.readline().strip()
        if said != "done":
            self._log.seek(0)
            raise RuntimeError(f"the bed of hosts failed at: {line}\n{self._log.read()}")


def _new_folder() -> tuple[Path, int]:
    """Create a folder; return it and the file descriptor of its lock.

    The hosts hold the lock as long as they run. Folders whose lock is not held are removed: they
    are left over from runs that were killed together with the process that keeps the hosts.
    """
    gate = os.open(PARENT, os.O_RDONLY)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        for old in PARENT.glob(PREFIX + "*"):
            lock = os.open(old, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
            except BlockingIOError:
                pass
            finally:
                os.close(lock)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
        folder.chmod(0o755)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(gate)
    return folder, lock
