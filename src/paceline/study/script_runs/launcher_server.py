"""The launcher server: the process from which launchers are forked, after one import of torch.

A launcher is a ``paceline run`` of its own. When the other end of the server's socket closes, also
by ``kill -9``, the server ends all launchers; they, or the rank servers that lose them, end their
ranks. ``python -m paceline.study.script_runs.launcher_server FD MODULES`` runs commands.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ...launch.linux_processes import PARENT_DEATH_SIGNAL, prctl
from ...security.processes import python_command

MAX_MESSAGE_BYTES = 100_000  # of the socket; longer requests are in a file
END_TIMEOUT_S = 20.0
MODULES = (
    *("paceline.launch.start", "paceline.launch.target", "paceline.launch.supervise"),
    "paceline.launch.single_node",
    *("paceline.launch.ranks.rank_process", "paceline.launch.affinity.bind_ranks"),
)
# Asks for GPUs without an initialization of their driver, which forks could not use then.
CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


class LauncherServerError(ValueError):
    """The server has ended."""


class LauncherServer:
    """The server, as its user sees it. It begins with the first launcher.

    Attributes:
        after: What to do after the server has ended, as the end of the hint.

    Args:
        modules: Modules that the server imports once for all launchers.
        program: Module of the server: its launchers run what ``start`` asks for.
        output: Descriptor of the server's standard output and error; None: those of this process.
    """

    after = ""

    def __init__(
        self, modules: Sequence[str], program: str = __name__, output: int | None = None
    ) -> None:
        self._modules, self._program, self._output = modules, program, output
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}  # of launchers that have ended, for ``code``
        self._count = 0

    def start_command(self, words: Sequence[str], log: str) -> "Launcher":
        """Start a command of this module's program."""
        self._count += 1
        return Launcher(self, self._count, words, log)

    def code(self, number: int, timeout_s: float | None) -> int | None:
        """Return the exit code of a command, or None if it still runs after a time."""
        if number not in self._codes:
            try:
                self._codes |= dict(self.ended(timeout_s))
            except LauncherServerError:
                return -signal.SIGKILL
        return self._codes.get(number)

    def send_start(self, number: int, request: dict[str, Any]) -> None:
        """Start a launcher. Raises LauncherServerError."""
        if self._process is None:
            descriptor = self._theirs.fileno()
            self._process = subprocess.Popen(
                python_command("-m", self._program, str(descriptor), ",".join(self._modules)),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[descriptor],
                process_group=0,
            )
            self._theirs.close()
        data = json.dumps({"start": request, "number": number}).encode()
        if len(data) <= MAX_MESSAGE_BYTES:
            self._send(data)
            return
        with open(os.memfd_create("request"), "w+b", buffering=0) as file:
            file.write(data)
            file.seek(0)
            self._send(b"file", file.fileno())

    def signal(self, number: int, kind: int) -> None:
        """Send a signal to a launcher, if it still runs. Raises LauncherServerError."""
        self._send(json.dumps({"signal": number, "kind": int(kind)}).encode())

    def ended(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Wait for launchers that end; return their numbers and exit codes.

        Raises:
            LauncherServerError: The server has ended.
        """
        found = []
        while select.select([self._channel], [], [], timeout_s)[0]:
            data = self._channel.recv(MAX_MESSAGE_BYTES)
            if not data:
                raise self._error()
            message = json.loads(data)
            if "ended" in message:
                found.append((int(message["ended"]), int(message["code"])))
            timeout_s = 0.0
        return found

    def close(self) -> None:
        """End the server and all launchers."""
        self._channel.close()
        if self._process is None:
            self._theirs.close()
            return
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, data: bytes, *descriptors: int) -> None:
        try:
            socket.send_fds(self._channel, [data], descriptors)
        except OSError:
            raise self._error() from None

    def _error(self) -> LauncherServerError:
        return LauncherServerError(
            "the process that starts the runs has ended, and with it all runs that were in "
            "progress. HINT: if nobody killed it, the node was probably out of memory: see dmesg"
            f"{self.after}"
        )


class Launcher:
    """A command that the server runs, with the part of the interface of Popen that is used.

    Args:
        server: The server, of this module's program.
        number: Number of the command, in this server.
        words: ``python_command("-m", ...)``.
        log: File of its output.
    """

    def __init__(self, server: LauncherServer, number: int, words: Sequence[str], log: str) -> None:
        self._server, self._number = server, number
        self.returncode: int | None = None
        request = {"words": list(words), "output": log, "folder": os.getcwd()}
        server.send_start(number, request)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends. Raises subprocess.TimeoutExpired."""
        begun = time.monotonic()
        while (code := self._look(timeout)) is None:
            if timeout is not None and time.monotonic() - begun >= timeout:
                raise subprocess.TimeoutExpired(f"command {self._number}", timeout)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it still runs."""
        try:
            self._server.signal(self._number, sig)
        except LauncherServerError:
            pass  # the server has ended it

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.code(self._number, timeout_s)
        return self.returncode


# In the server


def serve(
    channel: socket.socket, modules: Sequence[str], prepare: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Start launchers until the other end closes. Returns only in a launcher, with its request.

    Args:
        prepare: Called before the first fork, after the imports.
    """
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)  # the other end decides
    wake_out, wake_in = os.pipe()
    os.set_blocking(wake_in, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    _import(modules)
    prepare()
    launchers: dict[int, int] = {}  # by process ID
    while True:
        ready, _, _ = select.select([channel.fileno(), wake_out], [], [])
        if wake_out in ready:
            os.read(wake_out, 4096)
            _reap(channel, launchers)
        if channel.fileno() not in ready:
            continue
        try:
            data = _receive(channel)
        except OSError:
            data = b""
        if not data:
            _end_all(launchers)
        message: dict[str, Any] = json.loads(data)
        if "signal" in message:
            for pid, number in launchers.items():
                if number == message["signal"]:
                    os.kill(pid, message["kind"])
            continue
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for fd in (wake_out, wake_in):
                os.close(fd)
            channel.close()
            prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            request: dict[str, Any] = message["start"]
            return request
        launchers[pid] = message["number"]


def _receive(channel: socket.socket) -> bytes:
    """Return a message; b"" after the last one."""
    data, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1)
    if not descriptors:
        return data
    with open(descriptors[0], "rb") as file:
        return file.read()


def _import(modules: Sequence[str]) -> None:
    """Import modules, as far as that is possible: scripts get the same errors, with a traceback."""
    is_set = CUDA_CHECK in os.environ
    os.environ.setdefault(CUDA_CHECK, "1")
    gc.disable()  # frees nothing during imports, and costs a third of their time
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:
            pass
    gc.enable()
    gc.collect()
    gc.freeze()
    if not is_set:
        os.environ.pop(CUDA_CHECK, None)


def _reap(channel: socket.socket, launchers: dict[int, int]) -> None:
    while launchers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        number = launchers.pop(pid, None)
        if number is not None:
            try:
                channel.send(json.dumps({"ended": number, "code": code}).encode())
            except OSError:
                return


def _end_all(launchers: dict[int, int]) -> NoReturn:
    """Kill the launchers: their rank servers end the ranks."""
    for pid in launchers:
        os.kill(pid, signal.SIGKILL)
    for pid in launchers:
        os.waitpid(pid, 0)
    os._exit(0)


def become_launcher(output: str, folder: str) -> None:
    """Give the forked process a session, output and signal handlers of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(kind, signal.SIG_DFL)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout = open(1, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.chdir(folder)


def _run(words: list[str]) -> None:
    """Run ``python_command("-m", MODULE, ...)`` in this process."""
    first = python_command("-m")
    assert words[: len(first)] == first
    sys.argv = words[len(first) :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def main(fd: int, modules: str) -> NoReturn:
    """Serve commands; a launcher runs its command, and ends."""
    request = serve(socket.socket(fileno=fd), [name for name in modules.split(",") if name])
    try:
        become_launcher(request["output"], request["folder"])
    except OSError as error:
        sys.stderr.write(f"paceline: a run can't be started: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    code = 0
    try:
        _run(request["words"])
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)  # an interpreter's end would copy what it shares with the server


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
