"""Start ``paceline`` and scripts from a process that has already imported torch.

An interpreter takes 3 s of CPU time to import torch, which is most of the time of many tests. The
first command of a pytest process starts a server, which imports torch and Paceline once. Each
command runs in a fork of this server, with the environment variables, working directory, standard
streams and command line of the request. PACELINE_TESTS_WARM=0 starts every command in a new
interpreter; the slow tiers of the tests do so.

A fork differs from a new interpreter in that the modules are already imported, and are not
destroyed at the end. ``fits`` decides which commands may be started this way. Tests of the end of
a process set the environment variable PACELINE_TESTS_WHOLE_END: its ranks destroy all modules.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

BIN = Path(sys.executable).parent
WHOLE_END = "PACELINE_TESTS_WHOLE_END"
MAX_REQUEST_BYTES = 150_000
COMMAND_LINE_BYTES = 8192
# Libraries read variables with these prefixes when they are loaded.
READ_AT_IMPORT = ("OMP_", "KMP_", "GOMP_", "MKL_", "TORCH", "LD_", "PYTHON", "CUDA", "MALLOC_")
IMPORTED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.run",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "torch.multiprocessing",
    "paceline",
    "paceline.cli",
    "paceline.data.loading.loader",
    "paceline.data.staging.stage",
    "paceline.launch.start",
    "paceline.launch.target",
    "paceline.cluster.schedulers.detect",
    "paceline.analyze.figures.report",
    "paceline.launch.supervise",
    "paceline.launch.ranks.rank_process",
    "paceline.record.hooks.torch_patches",
    "paceline.report.terminal.run_report",
    "paceline.world",
)


def at_import(environment: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}


def fits(command: list[str], environment: dict[str, str]) -> bool:
    """Return whether a command may be started by the server.

    The command has to be one of ``paceline`` or a Python script that imports torch. Environment
    variables that libraries read when they are loaded need the same values as in the server.
    """
    if os.environ.get("PACELINE_TESTS_WARM") == "0":
        return False
    if command[0] != str(BIN / "paceline"):
        script = Path(command[1]) if len(command) > 1 and command[1].endswith(".py") else None
        if command[0] != sys.executable or script is None or not script.exists():
            return False
        if "torch" not in script.read_text():
            return False
    return at_import(environment) == at_import(_server_environment())


class Process:
    """A command that the server started, with the interface of ``subprocess.Popen`` for text.

    Args:
        stdout: None to inherit, a file, or ``subprocess.PIPE`` or ``DEVNULL``; same for stderr.
    """

    def __init__(
        self,
        command: list[str],
        *,
        cwd: Path | None = None,
        env: dict[str, str],
        stdout: Any = None,
        stderr: Any = None,
    ) -> None:
        self.args, self.returncode = command, None
        request = {"command": command, "cwd": str(cwd or Path.cwd()), "env": env}
        with ExitStack() as opened:

            def ends(kind: Any, inherited: int) -> tuple[int, Any]:
                if kind == subprocess.PIPE:
                    read, write = os.pipe()
                    opened.callback(os.close, write)
                    return write, open(read, errors="replace")
                if kind == subprocess.DEVNULL:
                    null = os.open(os.devnull, os.O_RDWR)
                    opened.callback(os.close, null)
                    return null, None
                return (inherited if kind is None else kind.fileno()), None

            null, _ = ends(subprocess.DEVNULL, 0)
            out, self.stdout = ends(stdout, 1)
            err, self.stderr = ends(stderr, 2)
            status, self._status = ends(subprocess.PIPE, 0)
            with _lock:
                fds = [null, out, err, status]
                socket.send_fds(_server(), [json.dumps(request).encode()], fds)
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            global cpu_s
            code, used_s = self._status.readline().split()
            self.returncode = int(code)
            cpu_s += float(used_s)
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Return stdout and stderr once all processes that hold them have ended, like Popen."""
        texts: list[str | None] = [None, None]

        def read(number: int, stream: Any) -> None:
            texts[number] = stream.read()
            stream.close()

        streams = [(n, one) for n, one in enumerate((self.stdout, self.stderr)) if one]
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        until = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if until is None else until - time.monotonic())
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(
    command: list[str], *, cwd: Path, env: dict[str, str], timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Run a command; same as ``subprocess.run`` with captured text and no standard input."""
    process = Process(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.wait(), out, err)


cpu_s = 0.0  # CPU time of all commands that have ended, and of processes that they waited for
_lock = threading.Lock()
_servers: dict[int, socket.socket] = {}  # by PID: a forked process starts a separate server


def _server_environment() -> dict[str, str]:
    import ranks

    return ranks.environment()


def _server() -> socket.socket:
    if os.getpid() not in _servers:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, __file__, str(its.fileno()), " " * COMMAND_LINE_BYTES]
        process = subprocess.Popen(words, pass_fds=[its.fileno()], env=_server_environment())
        its.close()
        _servers[os.getpid()] = ours
        atexit.register(lambda: (ours.close(), process.wait()))
    return _servers[os.getpid()]


def serve(channel: socket.socket) -> NoReturn:
    """Fork a process per request, until pytest closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forked processes
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # garbage collection in forked processes skips the imported modules
    while True:
        data, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 4)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            _wait_for_command(json.loads(data), fds)
        for fd in fds:
            os.close(fd)


def _wait_for_command(request: dict, fds: list[int]) -> NoReturn:
    """Fork the command, and write its PID and its exit code to the status pipe."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _become(request, fds)
    for fd in fds[:3]:
        os.close(fd)
    os.write(fds[3], f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime:.3f}\n"
    os.write(fds[3], line.encode())
    os._exit(0)


def _become(request: dict, fds: list[int]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(3):
        os.dup2(fds[number], number)
    for fd in fds:
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    command = request["command"]
    _set_command_line(command)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    script = sys.executable != command[0]
    sys.argv = command if script else command[1:]
    sys.path[0] = str(BIN) if script else os.path.dirname(os.path.abspath(command[1]))
    if WHOLE_END not in request["env"]:
        _shorten_end_of_ranks()
    code = 1
    try:
        if script:
            from paceline.cli import main

            main()
        else:
            runpy.run_path(command[1], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if WHOLE_END in request["env"]:
        sys.stdout.flush()
        ctypes.pythonapi.Py_Exit(ctypes.c_int(code))
    _end(code)


def _shorten_end_of_ranks() -> None:
    """Let ranks that this process forks end as those of short trials do."""
    from paceline.launch.ranks import rank_process

    rank_process.may_be_short = lambda: True


def _end(code: int) -> NoReturn:
    """End the process as an interpreter does, without the destruction of imported modules.

    Threads are joined, exit handlers run, the script's objects are destroyed, and output is
    written. The destruction of torch's modules takes 0.3 s of CPU time in each process.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    script = sys.modules["__main__"].__dict__
    if script is not globals():
        script.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120  # same as Python
    os._exit(code & 0xFF)


def _set_command_line(command: list[str]) -> None:
    """Replace the server's command line in /proc/PID/cmdline by ``command``."""
    from paceline.security.processes import stat_fields

    fields = stat_fields("self")
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"\0".join([sys.executable.encode(), *(word.encode() for word in command)])
    text = text[: end - start - 1]
    ctypes.memmove(start, text + b"\0" * (end - start - len(text)), end - start)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
