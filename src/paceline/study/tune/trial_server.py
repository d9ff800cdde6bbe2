"""The trial server: the process from which the launchers of trials are forked, after one import of
torch. ``python -m paceline.study.tune.trial_server FD`` is started by ``TrialServer``.

Each trial is a ``paceline run`` of its own: a fork of this process becomes its launcher. When the
runner's end of the socket closes, also by ``kill -9``, the server ends all launchers; they, or the
rank servers that lose them, end their ranks.
"""

import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ...launch.linux_prctl import PARENT_DEATH_SIGNAL, prctl
from ...launch.ranks.local_host import ForkedRankServer
from ...security.folders import replace_file
from ...security.processes import python_command

MAX_MESSAGE_BYTES = 200_000
END_TIMEOUT_S = 20.0
MODULES = (
    *("paceline.launch.start", "paceline.launch.target", "paceline.launch.supervise"),
    *("paceline.launch.single_node", "paceline.launch.ranks.elastic_agent"),
    *("paceline.launch.ranks.rank_process", "paceline.launch.affinity.bind_ranks"),
)


@dataclass(frozen=True)
class TrialStart:
    """What one launcher runs.

    Attributes:
        number: Number of the attempt, in this server.
        words: Script and arguments, or -m, module and arguments.
        ranks: Number of ranks.
        share: See ``Job.share``.
        hosts: Value of -H; "" for ranks on this node.
        launcher: Value of --launcher, or None.
        variables: Environment variables of the ranks.
        folder: Working directory.
        output, end_file, lock: Files of the attempt.
        hang_timeout: Same as for ``paceline run``.
        nodes: Number of nodes; of one that it shares, its part.
        summary: File for the JSON summary.
        stage: Packed datasets to stage.
    """

    number: int
    words: list[str]
    ranks: int
    share: tuple[int, int, int, int]
    folder: str
    output: str
    end_file: str
    lock: str
    hosts: str = ""
    launcher: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    hang_timeout: float | None = None
    nodes: float = 1.0
    summary: str = ""
    stage: list[str] = field(default_factory=list)


class TrialServerError(ValueError):
    """The server has ended."""


class TrialServer:
    """The server, as the runner sees it. It begins with the first trial.

    Args:
        preloads: Modules that the server imports once for all trials.
    """

    def __init__(self, preloads: Sequence[str]) -> None:
        self._preloads = preloads
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, request: TrialStart) -> None:
        """Start a launcher. Raises TrialServerError."""
        if self._process is None:
            number = self._theirs.fileno()
            self._process = subprocess.Popen(
                python_command("-m", __name__, str(number), ",".join(self._preloads)),
                stdin=subprocess.DEVNULL,
                pass_fds=[number],
                process_group=0,
            )
            self._theirs.close()
        data = json.dumps({"start": asdict(request)}).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError("the command of a trial is too long")
        self._send(data)

    def signal(self, number: int, kind: int) -> None:
        """Send a signal to a launcher, if it still runs. Raises TrialServerError."""
        self._send(json.dumps({"signal": number, "kind": int(kind)}).encode())

    def ended(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for launchers that end; return their numbers and exit codes.

        Raises:
            TrialServerError: The server has ended.
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

    def _send(self, data: bytes) -> None:
        try:
            self._channel.send(data)
        except OSError:
            raise self._error() from None

    def _error(self) -> TrialServerError:
        return TrialServerError(
            "the process that starts the trials has ended, and with it all trials that ran. HINT: "
            "if nobody killed it, the node was probably out of memory: see dmesg; then continue "
            "the study with --continue"
        )


# In the server


def serve(channel: socket.socket, preloads: Sequence[str]) -> TrialStart:
    """Start launchers until the runner's end closes. Returns only in a launcher."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)  # the runner decides
    wake_out, wake_in = os.pipe()
    os.set_blocking(wake_in, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    for name in (*MODULES, *preloads):
        try:
            importlib.import_module(name)
        except Exception:
            pass  # the script gets the same error, with a traceback
    import gc

    gc.collect()
    gc.freeze()
    launchers: dict[int, int] = {}  # by process ID
    while True:
        ready, _, _ = select.select([channel.fileno(), wake_out], [], [])
        if wake_out in ready:
            os.read(wake_out, 4096)
            _reap(channel, launchers)
        if channel.fileno() not in ready:
            continue
        try:
            data = channel.recv(MAX_MESSAGE_BYTES)
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
        start = TrialStart(**message["start"])
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
            return start
        launchers[pid] = start.number


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


def _become_launcher(start: TrialStart) -> None:
    """Turn the forked process into the launcher of a trial: session, files, environment."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(kind, signal.SIG_DFL)
    lock = os.open(start.lock, os.O_RDWR)  # kept open by all processes of the attempt
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        pass  # the file system has no such locks
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    output = os.open(start.output, flags, 0o666)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    sys.stdout = open(1, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.chdir(start.folder)
    # A trial that pauses must not put the whole job of the study back into the queue.
    os.environ.pop("PACELINE_REQUEUE", None)


def launch(start: TrialStart) -> int:
    """Run the job of a trial, and return its exit code."""
    from ...launch import single_node
    from ...launch import start as start_job
    from ...launch.job import Job

    is_module = start.words[0] == "-m"
    name, *args = start.words[is_module:]
    job = Job(
        name=name,
        args=args,
        module=is_module,
        ranks=start.ranks,
        share=start.share,
        hang_timeout=start.hang_timeout,
        summary=Path(start.summary),
        stage=start.stage,
    )
    if not start.hosts:
        os.environ.update(start.variables)
        return single_node.run(job)
    variables = [f"{key}={value}" for key, value in start.variables.items()]
    return start_job.start(job, start.ranks, start.hosts, None, start.launcher, variables)


def main(fd: int, preloads: str) -> None:
    start = serve(socket.socket(fileno=fd), [one for one in preloads.split(",") if one])
    began, server = time.monotonic(), None
    try:
        _become_launcher(start)
        code = _end(start, began, launch(start), "")
    except ForkedRankServer as forked:
        server = forked
    except (ValueError, OSError) as mistake:
        code = _end(start, began, 2, f"paceline: {mistake}\n")
    except KeyboardInterrupt:
        code = _end(start, began, 130, "paceline: interrupted\n")
    if server is not None:  # outside of ``except``: a rank's exceptions get no __context__
        from ...launch.single_node import run_rank_server

        run_rank_server(server)
    os._exit(code)


def _end(start: TrialStart, began: float, code: int, text: str) -> int:
    """Print why a launcher ends, and write its end file."""
    sys.stderr.write(text)
    sys.stdout.flush()
    sys.stderr.flush()
    end = {"code": code, "seconds": time.monotonic() - began, "nodes": start.nodes}
    try:
        replace_file(Path(start.end_file), json.dumps(end).encode())
    except OSError:
        pass  # the runner knows the exit code, unless it is killed now
    return code


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
