"""``paceline bench comm``: measure collectives in one Paceline job and in one mpirun job."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from ..cost.machine.dataclass_tree import from_tree
from ..cost.machine.machine_file import AtSize, Collective, Machine
from ..launch.job import Job
from ..launch.options import LaunchOptions, NodeOptions
from ..launch.start import start
from ..plurals import counted
from ..security.processes import find_program, python_command
from .rank_summary import run_and_read_summary

PROBE = "paceline.study.probe.bench_comm"
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


def bench(wish: BenchRequest, say: Callable[[str], None]) -> BenchResults:
    """Measure one collective on all available backends.

    Raises:
        ValueError: An option is invalid, or the job failed.
    """
    if wish.operation not in OPERATIONS:
        raise ValueError(
            f"--operation {wish.operation} is not a collective. HINT: {', '.join(OPERATIONS)}"
        )
    words = ["--operation", wish.operation, "--sizes", *map(str, wish.sizes)]
    enough = wish.nodes.hosts is not None or wish.ranks <= len(os.sched_getaffinity(0))
    bind = wish.bind or ("core" if enough else "none")
    say(
        f"measuring {wish.operation} on {counted(wish.ranks, 'rank')} at "
        f"{counted(len(wish.sizes), 'size')}"
    )
    code, found = run_and_read_summary(
        Job(PROBE, words, True, bind=bind, hang_timeout=0.0),
        lambda job: start(job, LaunchOptions(wish.ranks, wish.nodes)),
    )
    if found is None:
        raise ValueError(
            f"nothing was measured, because the ranks ended with exit code {code}. HINT: their "
            "error is above"
        )
    notes: list[str] = []
    more: dict[str, Any] = {}
    if wish.nodes.hosts is None and wish.nodes.hostfile is None:
        more, why = _mpi(wish, words, say)
        notes += [f"MPI was not measured: {why}"] if why else []
    told = [*found["collectives"], *more.get("collectives", [])]
    copies = [from_tree(AtSize, one, "", []) for one in found["copies"]]
    return BenchResults([from_tree(Collective, one, "", []) for one in told], copies, notes)


def _mpi(
    wish: BenchRequest, words: list[str], say: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """Return the results of a job started by mpirun, or the reason why there are none."""
    launcher = find_program("mpirun") or find_program("mpiexec")
    if find_spec("mpi4py") is None or launcher is None:
        return {}, (
            "mpi4py or mpirun is missing. HINT: pip install mpi4py, and load the MPI module of the "
            "cluster"
        )
    say(f"measuring {wish.operation} through MPI")
    # Allow Open MPI to start more ranks than there are cores, as Paceline also does.
    environment = {**os.environ, "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    probe = python_command("-m", PROBE, "--mpi", *words)
    command = [launcher, "-n", str(wish.ranks), *probe]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MPI_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return {}, f"{launcher} did not end in {MPI_SECONDS} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).splitlines()
        first = next((line for line in said if re.search(r"\w", line)), "")
        return {}, f"{launcher} ended with exit code {done.returncode}: {first}"
    return dict(json.loads(lines[0])), ""


def merge_collectives(machine: Machine, found: list[Collective]) -> Machine:
    """Return the machine with these collectives in place of older ones of the same group."""

    def key(one: Collective) -> tuple[object, ...]:
        return one.group, one.operation, one.ranks, one.hosts, one.backend

    new = {key(one) for one in found}
    kept = [one for one in machine.collectives if key(one) not in new]
    return replace(machine, collectives=(*kept, *found))
