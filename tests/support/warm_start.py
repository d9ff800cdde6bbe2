"""Start ``paceline`` and scripts from a process that has imported torch already.

An interpreter that imports torch takes 3 s of CPU time, most of what many tests take. The first
call of ``run`` in a pytest process starts a server, which imports torch and Paceline once; each
command is a fork of it. Its environment variables, working directory, standard streams and command
line are those of the request. PACELINE_TESTS_WARM=0 starts every command with an interpreter of its
own; the slow tiers do so.

Only the modules differ from a new interpreter: they are imported already. ``fits`` says which
commands may be started so.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

BIN = Path(sys.executable).parent
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
    "paceline.launch.ranks.elastic_agent",
    "paceline.launch.ranks.rank_process",
    "paceline.launch.supervise",
    "paceline.record.hooks.torch_patches",
    "paceline.report.terminal.run_report",
    "paceline.world",
)


def at_import(environment: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}


def fits(command: list[str], environment: dict[str, str]) -> bool:
    """Return whether a command may be started by the server.

    It is ``paceline run`` or a Python script, of a script that imports torch, and its environment
    has the server's values of the variables that are read when a library is loaded.
    """
    if os.environ.get("PACELINE_TESTS_WARM") == "0" or "-m" in command:
        return False
    scripts = [word for word in command[1:] if word.endswith(".py") and os.path.exists(word)]
    if command[:2] != [str(BIN / "paceline"), "run"] and command[0] != sys.executable:
        return False
    if not scripts or "torch" not in Path(scripts[0]).read_text():
        return False
    return at_import(environment) == at_import(_server_environment())


def run(
    command: list[str], *, cwd: Path, env: dict[str, str], timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Run a command; same as ``subprocess.run`` with captured text and no standard input."""
    pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, status
    null = os.open(os.devnull, os.O_RDONLY)
    request = json.dumps({"command": command, "cwd": str(cwd), "env": env}).encode()
    try:
        with _lock:
            socket.send_fds(_server(), [request], [null, *(write for _, write in pipes)])
    finally:
        for fd in (null, *(write for _, write in pipes)):
            os.close(fd)
    texts = ["", "", ""]

    def read(number: int) -> None:
        with open(pipes[number][0], errors="replace") as stream:
            for line in stream:
                texts[number] += line

    readers = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(3)]
    for reader in readers:
        reader.start()
    readers[2].join(timeout)
    if readers[2].is_alive():
        os.kill(int(texts[2].split()[0]), signal.SIGKILL)
        for reader in readers:
            reader.join(10)
        raise subprocess.TimeoutExpired(command, timeout, texts[0], texts[1])
    for reader in readers[:2]:
        reader.join(timeout)
    code = int(texts[2].split()[1])
    return subprocess.CompletedProcess(command, code, texts[0], texts[1])


_lock = threading.Lock()
_servers: dict[int, socket.socket] = {}  # by PID: a forked process starts one of its own


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
    """Fork a process per request, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is pytest's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collectors of forked processes skip what is imported
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
    os.write(fds[3], f"{os.waitstatus_to_exitcode(status)}\n".encode())
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
    # Py_Exit is what the interpreter ends with: threads are joined, exit handlers run.
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
    sys.stdout.flush()
    ctypes.pythonapi.Py_Exit(ctypes.c_int(code))
    raise AssertionError("unreachable")


def _set_command_line(command: list[str]) -> None:
    """Show a command in /proc/PID/cmdline in place of the server's, padded with spaces."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"\0".join([sys.executable.encode(), *(word.encode() for word in command)])
    text = text[: end - start - 1]
    ctypes.memmove(start, text + b"\0" * (end - start - len(text)), end - start)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
