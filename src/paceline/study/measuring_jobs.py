"""Jobs whose ranks measure: ``paceline check`` and ``paceline bench comm``."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..cluster.topology.racks import RACKS_VARIABLE
from ..cost.machine.dataclass_tree import from_tree
from ..cost.machine.machine_file import AtSize, Collective, Machine
from ..launch.job import Job
from ..launch.options import LaunchOptions, NodeOptions
from ..launch.ranks.local_host import ForkedRankServer
from ..launch.start import start
from ..plurals import counted
from ..security.processes import find_program, python_command
from ..security.removal import TemporaryFolder


@contextmanager
def removed_after_job(remove: Callable[[], object]) -> Iterator[None]:
    """Remove the folder of a job after it, but not in its forked rank server.

    remove: Removes the folder.
    """
    try:
        yield
    except ForkedRankServer:  # the folder belongs to the parent process
        raise
    except BaseException:
        remove()
        raise
    remove()


def run_and_read_summary(job: Job, options: LaunchOptions, failure: str) -> tuple[int, Any]:
    """Run a measuring job; return its exit code, and the summary that its rank 0 sends.

    Raises:
        ValueError: There is no summary. ``failure``: The message, with {code}.
    """
    scratch = TemporaryFolder()
    summary = scratch.path / "found.json"
    with removed_after_job(scratch.remove):
        code = start(replace(job, summary=summary), options)
        found = json.loads(summary.read_text()) if summary.exists() else None
    if found is None:
        raise ValueError(failure.format(code=code))
    return code, found


# ``paceline bench comm``: measure collectives in one Paceline job and in one mpirun job.

BENCH_PROBE = "paceline.study.probe.bench_comm"
SIZES = tuple(1 << power for power in range(10, 29, 2))  # 1 KiB to 256 MiB
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
MPI_SECONDS = 300


@dataclass(frozen=True)
class BenchResults:
    """Results of ``bench``.

    Attributes:
        collectives: One entry for each backend; all are the same operation.
        copies: Times of memory copies of the same sizes.
        notes: What was not measured, and the reason.
    """

    collectives: list[Collective]
    copies: list[AtSize]
    notes: list[str]


@dataclass(frozen=True)
class BenchRequest:
    """What to measure, and on which hosts, from the command's options.

    Attributes:
        sizes: Vector sizes in bytes.
        bind: CPU binding of the ranks. Default: core if there are enough cores, otherwise none.
    """

    operation: str = OPERATIONS[0]
    sizes: tuple[int, ...] = SIZES
    ranks: int = 2
    nodes: NodeOptions = field(default_factory=NodeOptions)
    bind: str | None = None


def bench(request: BenchRequest, say: Callable[[str], None]) -> BenchResults:
    """Measure one collective on all available backends.

    Raises:
        ValueError: An option is invalid, or the job failed.
    """
    if request.operation not in OPERATIONS:
        raise ValueError(
            f"--operation {request.operation} is not a collective. HINT: {', '.join(OPERATIONS)}"
        )
    words = ["--operation", request.operation, "--sizes", *map(str, request.sizes)]
    enough = request.nodes.hosts is not None or request.ranks <= len(os.sched_getaffinity(0))
    bind = request.bind or ("core" if enough else "none")
    say(
        f"measuring {request.operation} on {counted(request.ranks, 'rank')} at "
        f"{counted(len(request.sizes), 'size')}"
    )
    _, found = run_and_read_summary(
        Job(BENCH_PROBE, words, True, bind=bind, hang_timeout=0.0),
        LaunchOptions(request.ranks, request.nodes),
        "nothing was measured, because the ranks ended with exit code {code}. HINT: their error is "
        "above",
    )
    notes: list[str] = []
    more: dict[str, Any] = {}
    if request.nodes.hosts is None and request.nodes.hostfile is None:
        more, why = _mpi(request, words, say)
        notes += [f"MPI was not measured: {why}"] if why else []
    measured = [*found["collectives"], *more.get("collectives", [])]
    collectives = [from_tree(Collective, tree, "", []) for tree in measured]
    copies = [from_tree(AtSize, tree, "", []) for tree in found["copies"]]
    return BenchResults(collectives, copies, notes)


def _mpi(
    request: BenchRequest, words: list[str], say: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """Return the results of a job started by mpirun, or the reason why there are none."""
    launcher = find_program("mpirun") or find_program("mpiexec")
    if find_spec("mpi4py") is None or launcher is None:
        return {}, (
            "mpi4py or mpirun is missing. HINT: pip install mpi4py, and load the MPI module of the "
            "cluster"
        )
    say(f"measuring {request.operation} through MPI")
    # Allow Open MPI to start more ranks than there are cores, as Paceline also does.
    environment = {**os.environ, "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    probe = python_command("-m", BENCH_PROBE, "--mpi", *words)
    command = [launcher, "-n", str(request.ranks), *probe]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MPI_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return {}, f"{launcher} did not end in {MPI_SECONDS} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        output = (done.stderr or done.stdout).splitlines()
        first = next((line for line in output if re.search(r"\w", line)), "")
        return {}, f"{launcher} ended with exit code {done.returncode}: {first}"
    return dict(json.loads(lines[0])), ""


def merge_collectives(machine: Machine, found: list[Collective]) -> Machine:
    """Return the machine with these collectives in place of older ones of the same group."""

    def key(collective: Collective) -> tuple[object, ...]:
        return (
            collective.group,
            collective.operation,
            collective.ranks,
            collective.hosts,
            collective.backend,
        )

    new = {key(collective) for collective in found}
    kept = [collective for collective in machine.collectives if key(collective) not in new]
    return replace(machine, collectives=(*kept, *found))


# ``paceline check``: run a measuring job on all reachable hosts and return the machine file.

# Minimum number of ranks per host: collectives within a host need at least two ranks.
RANKS = 2
PROBE = "paceline.study.probe"


@dataclass(frozen=True)
class CheckResults:
    """Results of ``check``.

    Attributes:
        machine: The contents of the machine file.
        more: Facts of each host that the machine file format has no field for, by host name.
        notes: Remarks as text.
        code: Exit code of the job.
    """

    machine: Machine
    more: dict[str, dict[str, Any]]
    notes: list[str]
    code: int


@dataclass(frozen=True)
class CheckRequest:
    """What to measure, and on which hosts, from the options of ``paceline check``."""

    nodes: NodeOptions = field(default_factory=NodeOptions)
    ranks: int | None = None
    folder: Path | None = None
    quick: bool = False


def check(request: CheckRequest) -> CheckResults:
    """Measure all hosts that answer; hosts that do not answer are listed in the machine file.

    Raises:
        ValueError: An option is invalid, or nothing could be measured.
    """
    if request.folder is not None and not request.folder.is_dir():
        raise ValueError(
            f"--data {request.folder} is not a folder. HINT: give one that all hosts see"
        )
    arguments = ["--quick"] * request.quick
    if request.folder is not None:
        arguments += ["--data", str(request.folder.absolute())]
    without: dict[str, str] = {}
    job = Job(PROBE, arguments, True, bind="none", hang_timeout=0.0)

    variables = [
        *(request.nodes.env or []),
        *[RACKS_VARIABLE] * bool(os.environ.get(RACKS_VARIABLE)),
    ]
    options = LaunchOptions(
        request.ranks,
        replace(request.nodes, env=variables),
        min_ranks_per_host=RANKS,
        excluded_hosts=without,
    )
    code, found = run_and_read_summary(
        job,
        options,
        "nothing was measured, because the ranks of the check ended with exit code {code}. HINT: "
        "their error is above; paceline run -m paceline.study.probe --quick repeats the "
        "measurements without a machine file",
    )
    return CheckResults(*_read(found, without, request), code)


def _read(
    found: dict[str, Any], without: dict[str, str], request: CheckRequest
) -> tuple[Machine, dict[str, dict[str, Any]], list[str]]:
    more = {host["name"]: host.pop("more", {}) for host in found["hosts"]}
    words = ["paceline", "check", *(["-H", hosts] if (hosts := request.nodes.hosts) else [])]
    words += ["--data", str(request.folder)] if request.folder else []
    data = {
        "version": 1,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(words),
        "hosts": found["hosts"],
        "collectives": found["collectives"],
        "pairs": found["pairs"],
        "unreachable": {**without, **found["unreachable"]},
    }
    machine: Machine = from_tree(Machine, data, "", [])
    notes = [f"{', '.join(note['hosts'][:4])}: {note['text']}" for note in found["notes"]]
    return machine, more, notes
