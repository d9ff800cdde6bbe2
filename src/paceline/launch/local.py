"""``paceline run`` on this machine: check, start, watch, tell."""

import ast
import gc
import importlib.machinery
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ..cluster.host import cores, free_memory
from . import keep
from .interrupt import Interrupt
from .server import SUBREAPER, end_children, prctl

# What a rank takes before it has any data (its share of memory, measured with a tiny model).
RANK_BYTES = 64 << 20
FRESH_RANK_BYTES = 230 << 20
# A variable of these is meant for one rank's interpreter from its very start.
OWN_INTERPRETER = ("OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "LD_PRELOAD")
# Imported before the fork where the script imports them: heavy, and without side effects.
PRELOADED = ("torch", "numpy", "scipy", "sklearn", "pandas", "PIL")


@dataclass(frozen=True)
class Job:
    """What the user asked for."""

    name: str  # the script's path, or the module's name
    args: list[str] = field(default_factory=list)
    module: bool = False
    ranks: int = 1
    max_restarts: int = 0
    fresh: bool = False
    threads: int | None = None
    bind: str = "none"
    port: int = 0
    summary: Path | None = None
    record: Path | None = None


class InServer(BaseException):
    """Raised in the forked rank server to leave the command line's stack behind: what a rank's
    traceback shows below the script is then a few lines. ``cli.main`` catches it."""

    def __init__(self, channel: socket.socket, folder: Path, preloads: list[str]) -> None:
        super().__init__()
        self.channel, self.folder, self.preloads = channel, folder, preloads


class TerminatedError(Exception):
    """A signal asks the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(job: Job) -> int:
    """Run the job; its exit code: 0, the first failing rank's, or 128 + a signal's number.

    Raises ValueError for the user's mistakes, before any rank starts.
    """
    source = check(job)
    prctl(SUBREAPER, 1)
    interrupt = Interrupt()
    started = time.monotonic_ns()
    fresh = _fresh(job)
    if job.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(job.threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores()) // job.ranks)))
    folder = keep.job_folder()
    if job.record is not None:
        keep.promise(folder, job.record, [job.name, *job.args], folder.name)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = _start_server(ours, theirs, folder, [] if fresh else _preloads(job, source))
    theirs.close()
    try:
        code = _watch(job, ours, folder, started, interrupt)
    finally:
        try:
            ours.send(json.dumps({"end": 2.0}).encode())
        except OSError:
            pass
        ours.close()
        os.waitpid(server, 0)
        end_children(0.0)  # nobody, unless the rank server itself was killed
        if folder.exists():
            keep.clear(folder)
    if job.record is not None:
        _tell(job, job.record, code)
    return code


def _tell(job: Job, folder: Path, code: int) -> None:
    """What a recorded run ends with: its figures, unless it failed, and where the record is."""
    from ..analyze.load import load
    from ..analyze.report import analyse
    from ..report.terminal import drawn

    try:
        report = analyse(load(folder))
    except ValueError as error:
        sys.stderr.write(f"paceline: {error}\n")
        return
    if code == 0 and report.window_s is not None:
        sys.stderr.write(drawn(report))
    sys.stderr.write(f"paceline: the record is in {folder}. HINT: paceline report {folder}\n")
    if job.summary is not None:
        job.summary.write_text(report.to_json())


def _fresh(job: Job) -> bool:
    """Whether each rank gets an interpreter of its own."""
    return job.fresh or any(name in os.environ for name in OWN_INTERPRETER)


def check(job: Job) -> bytes:
    """Refuse what can't work; the source of the script or module."""
    if job.ranks < 1:
        raise ValueError(f"-n {job.ranks}: at least one rank is needed. HINT: -n 1")
    each = FRESH_RANK_BYTES if _fresh(job) else RANK_BYTES
    free = free_memory()
    if job.ranks * each > free:
        raise ValueError(
            f"-n {job.ranks}: {job.ranks} ranks take about {job.ranks * each / 2**30:.1f} GiB "
            f"before they have any data, and {free / 2**30:.1f} GiB are free here. "
            f"HINT: -n {max(1, free // each // 2)} or fewer"
        )
    if job.threads is not None and job.threads < 1:
        raise ValueError(f"--threads {job.threads}: HINT: 1 or more")
    if job.bind not in ("none", "core"):
        raise ValueError(f"--bind {job.bind} is not known. HINT: none or core")
    if job.bind == "core" and job.ranks > len(cores()):
        raise ValueError(
            f"--bind core: {job.ranks} ranks for {len(cores())} cores. HINT: --bind none"
        )
    if job.record is not None:
        keep.check(job.record)
    path = _module_file(job.name) if job.module else _script_file(job.name)
    try:
        source = path.read_bytes()
        compile(source, str(path), "exec")
    except SyntaxError as error:
        if error.lineno is None:
            raise ValueError(f"{path} can't be read as Python: {error.msg}") from None
        code = f"\n    {error.text.strip()}" if error.text else ""
        raise ValueError(
            f"{path}, line {error.lineno}: {error.msg}{code}\nHINT: no rank was started"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as Python: {error}") from None
    return source


def _script_file(name: str) -> Path:
    path = Path(name)
    if path.is_dir():
        raise ValueError(f"{name} is a folder. HINT: a script's path, or -m for a package")
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob("*.py"))[:5] if path.parent.is_dir() else []
        hint = f"Python files there: {', '.join(near)}" if near else "-m runs a module by its name"
        raise ValueError(f"{name} does not exist. HINT: {hint}")
    return path


def _module_file(name: str) -> Path:
    """The file that ``python -m name`` would run, found without importing anything."""
    folders: Any = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for i, part in enumerate(parts):
        qualified = ".".join(parts[: i + 1])
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            raise ValueError(f"there is no module {qualified}. HINT: a path needs no -m")
        folders = spec.submodule_search_locations
        if folders is None and i < len(parts) - 1:
            raise ValueError(f"{qualified} is no package. HINT: -m {qualified}")
    if folders is not None:  # a package runs its __main__
        spec = importlib.machinery.PathFinder.find_spec("__main__", folders)
        if spec is None:
            raise ValueError(f"the package {name} has no __main__. HINT: -m {name}.MODULE")
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"{name} is not a module of Python source")
    return Path(spec.origin)


def _preloads(job: Job, source: bytes) -> list[str]:
    """Modules worth importing once for all ranks: torch, and those of PRELOADED that the
    script names at its top."""
    found = ["torch", "torch.distributed", "torch.utils.data", "torch._dynamo"]
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    wanted = [name for name in found if name.split(".")[0] in PRELOADED]
    if any(name.split(".")[0] == "paceline" for name in found):
        wanted.append("paceline.world")
    return list(dict.fromkeys(wanted))


def _start_server(
    ours: socket.socket, theirs: socket.socket, folder: Path, preloads: list[str]
) -> int:
    """Import torch, then fork the process that the ranks will be forked from."""
    gc.disable()  # a collection in the middle of an import finds nothing and costs a third
    if preloads:
        import torch  # noqa: F401  once, before the fork, for this process and all ranks
    pid = os.fork()
    if pid:
        gc.enable()
        return pid
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    ours.close()
    raise InServer(theirs, folder, preloads)


def serve(job: InServer) -> NoReturn:
    """Be the rank server, and then each rank that is forked from it."""
    from . import rank, server

    for name in job.preloads:
        try:
            importlib.import_module(name)
        except Exception:
            pass  # the script will meet it again, and its traceback tells the user more
    gc.freeze()  # what was imported stays shared: no rank's collector touches it
    start = server.serve(job.channel, job.folder)
    if job.preloads:
        rank.run_forked(start)
    rank.exec_fresh(start)


def _watch(
    job: Job, channel: socket.socket, folder: Path, started: int, interrupt: Interrupt
) -> int:
    """Be the agent until the ranks have ended."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState

    from .agent import Agent, LocalRendezvous
    from .lines import Output

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    spec = WorkerSpec(
        role="default",
        local_world_size=job.ranks,
        rdzv_handler=LocalRendezvous(folder.name, job.port),
        entrypoint=job.name,
        max_restarts=job.max_restarts,
        monitor_interval=0.05,
    )
    agent = Agent(spec, channel, _environment(job, folder), _cpus(job), started)
    agent.interrupt = interrupt
    output = agent.output = Output(job.ranks, sys.stdout.buffer, sys.stderr.buffer, agent.hear)
    try:
        result = agent.run()
    except KeyboardInterrupt:
        return _interrupted(output, "interrupted", signal.SIGINT)
    except TerminatedError as end:
        return _interrupted(output, signal.Signals(end.number).name, end.number)
    finally:
        output.close()
    if result.state == WorkerState.SUCCEEDED:
        return 0
    return agent.cause.code or 1 if agent.cause is not None else 1


def _interrupted(output: Any, why: str, number: int) -> int:
    output.say(f"paceline: {why}: all ranks were ended; checkpoints written so far are whole\n")
    return 128 + number


def _terminate(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise TerminatedError(number)


def _environment(job: Job, folder: Path) -> dict[str, str]:
    """What every rank gets, beside torchrun's variables."""
    command = {"name": job.name, "args": job.args, "module": job.module}
    variables = {
        **os.environ,
        "PACELINE_COMMAND": json.dumps(command),
        "PACELINE_RECORD": str(folder),
        "PACELINE_RUN": folder.name,
    }
    if job.record is not None:
        variables["PACELINE_ATTACH"] = "1"
        variables["PACELINE_TELLS"] = "launcher"
    variables.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no need for its name to resolve
    if sys.stderr.isatty():
        variables["PACELINE_TTY"] = "1"
        variables["PACELINE_WIDTH"] = str(os.get_terminal_size(sys.stderr.fileno()).columns)
    if job.summary is not None:
        variables["PACELINE_SUMMARY"] = str(job.summary.absolute())
    return variables


def _cpus(job: Job) -> list[list[int]]:
    """Each rank's cores; empty: those of the launcher."""
    if job.bind == "none":
        return [[] for _ in range(job.ranks)]
    available = cores()
    each = len(available) // job.ranks
    return [available[i * each : (i + 1) * each] for i in range(job.ranks)]
