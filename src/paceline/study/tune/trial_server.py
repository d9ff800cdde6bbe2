"""The trial server: the launcher server (script_runs/launcher_server.py) of a study's trials."""

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...launch.monitor.interrupt import TerminatedError, raise_on_termination
from ...launch.ranks.local_host import ForkedRankServer
from ...security.folders import replace_file
from ..script_runs.launcher_server import MODULES, LauncherServer, become_launcher, serve
from .trial_folder import Attempt, TrialFolder

OF_TRIALS = ("paceline.tune", "paceline.launch.affinity.bind_ranks", "encodings.idna")


# Huge pages for a process that forks often, on Linux 6.1 and newer.
#
# A fork copies one entry for each page, and so does the end of the forked process.

_COLLAPSE = 25  # MADV_COLLAPSE of madvise(2)
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MAX_HUGE_PAGE_BYTES = 16 << 20  # a larger one would take more memory than the fork saves time


def use_huge_pages() -> None:
    """Move the memory that this process has allocated to huge pages, as far as possible."""
    try:
        size = int(_SIZE_FILE.read_text())
        lines = Path("/proc/self/maps").read_text().splitlines()
    except (OSError, ValueError):
        return
    if not mmap.PAGESIZE < size <= MAX_HUGE_PAGE_BYTES:
        return
    madvise = ctypes.CDLL(None).madvise
    for line in lines:
        addresses, mode, *_, node, name = [*line.split(maxsplit=5), ""][:6]
        is_anonymous = name.startswith(("[heap]", "[anon")) or not name
        if mode != "rw-p" or node != "0" or not is_anonymous:
            continue
        first, end = (int(address, 16) for address in addresses.split("-"))
        first, end = -(-first // size) * size, end // size * size
        if first < end:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _COLLAPSE)


@dataclass(frozen=True)
class TrialStart:
    """What one launcher runs.

    Attributes:
        number: Number of the attempt, in this server.
        trial, attempt: Folder of the trial, and number of the attempt there.
        words: Script and arguments, or -m, module and arguments.
        ranks: Number of ranks.
        share: See ``Job.share``.
        hosts: Value of -H; "" for ranks on this node.
        launcher: Value of --launcher, or None.
        variables: Environment variables of the ranks.
        folder: Working directory.
        hang_timeout: Same as for ``paceline run``.
        nodes: Number of nodes; of one that it shares, its part.
        stage: Packed datasets to stage.
        settings: Knobs, by name.
        parent: Folder of the trial whose checkpoint this one begins from; "": none.
    """

    number: int
    trial: str
    attempt: int
    words: list[str]
    ranks: int
    share: tuple[int, int, int, int]
    folder: str
    hosts: str = ""
    launcher: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    hang_timeout: float | None = None
    nodes: float = 1.0
    stage: list[str] = field(default_factory=list)
    settings: dict[str, bool | int | float | str] = field(default_factory=dict)
    parent: str = ""

    @property
    def files(self) -> Attempt:
        """The files of the attempt."""
        return Attempt(Path(self.trial), self.attempt)


class TrialServer(LauncherServer):
    """The server of trials, as the runner sees it.

    Args:
        preloads: Modules that the server imports once for all trials.
    """

    after = "; then continue the study with --continue"

    def __init__(self, preloads: Sequence[str]) -> None:
        super().__init__([*MODULES, *OF_TRIALS, *preloads], __name__)

    def start(self, request: TrialStart) -> None:
        """Start a launcher. Raises LauncherServerError."""
        self.send_start(request.number, asdict(request))


# In the server


def _prepare() -> None:
    """Do once what saves time in each of many forks."""
    from ...launch.affinity.bind_ranks import plan_bindings
    from ...launch.job import Job
    from ...launch.job_folder import clear_orphans

    with contextlib.suppress(ValueError, OSError):  # each launcher tells its own
        plan_bindings(Job(""))  # later calls find compiled patterns
    clear_orphans()
    use_huge_pages()


def _become_launcher(start: TrialStart) -> None:
    """Turn the forked process into the launcher of a trial."""
    lock = os.open(start.files.lock, os.O_RDWR)  # kept open by all processes of the attempt
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        pass  # the file system has no such locks
    become_launcher(str(start.files.output), start.folder)
    # A trial that pauses must not put the whole job of the study back into the queue.
    os.environ.pop("PACELINE_REQUEUE", None)


def take_parents_checkpoint(start: TrialStart) -> None:
    """Copy the checkpoint that the trial begins from. Here it delays no other trial.

    Raises:
        TerminatedError: The runner ends the trial; there is no checkpoint then.
        OSError: It can't be copied.
    """
    if start.parent:
        raise_on_termination()
        TrialFolder(Path(start.trial)).take_checkpoint(TrialFolder(Path(start.parent)))


def launch(start: TrialStart) -> int:
    """Run the job of a trial, and return its exit code."""
    from ...launch import single_node
    from ...launch import start as start_job
    from ...launch.job import Job
    from ...launch.options import LaunchOptions, NodeOptions

    is_module = start.words[0] == "-m"
    name, *args = start.words[is_module:]
    job = Job(
        name=name,
        args=args,
        module=is_module,
        ranks=start.ranks,
        share=start.share,
        hang_timeout=start.hang_timeout,
        summary=start.files.summary,
        stage=start.stage,
        settings=start.settings,
    )
    if not start.hosts:
        os.environ.update(start.variables)
        return single_node.run(job)
    variables = [f"{key}={value}" for key, value in start.variables.items()]
    nodes = NodeOptions(start.hosts, launcher=start.launcher, env=variables)
    return start_job.start(job, LaunchOptions(start.ranks, nodes))


def main(fd: int, modules: str) -> None:
    start = TrialStart(**serve(socket.socket(fileno=fd), modules.split(","), _prepare))
    began, server = time.monotonic(), None
    try:
        _become_launcher(start)
        take_parents_checkpoint(start)
        code = _end(start, began, launch(start), "")
    except ForkedRankServer as forked:
        server = forked
    except (ValueError, OSError) as mistake:
        code = _end(start, began, 2, f"paceline: {mistake}\n")
    except TerminatedError as end:
        code = _end(start, began, 128 + end.number, "paceline: terminated\n")
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
        replace_file(start.files.end_file, json.dumps(end).encode())
    except OSError:
        pass  # the runner knows the exit code, unless it is killed now
    return code


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
