"""``paceline bench comm``: one job that measures its collectives, and one of mpirun's."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..cost.machine.dataclass_tree import build
from ..cost.machine.machine_file import AtSize, Collective, Machine
from ..launch.job import Job
from ..launch.start import start
from .rank_summary import summary_of

PROBE = "paceline.study.probe.bench_comm"
SIZES = tuple(1 << power for power in range(10, 29, 2))  # 1 KiB to 256 MiB
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
MPI_SECONDS = 300


@dataclass(frozen=True)
class Benched:
    """collectives: of each backend, one operation. copies: of as many bytes, in memory. notes: what
    was not measured, and why."""

    collectives: list[Collective]
    copies: list[AtSize]
    notes: list[str]


@dataclass(frozen=True)
class Wish:
    """Where and what, as the options say."""

    operation: str = OPERATIONS[0]
    sizes: tuple[int, ...] = SIZES
    ranks: int = 2
    hosts: str | None = None
    hostfile: Path | None = None
    launcher: str | None = None
    bind: str | None = None  # core, where there are as many


def bench(wish: Wish, say: Callable[[str], None]) -> Benched:
    """Measure. Raises ValueError for mistakes, and where the job fails."""
    if wish.operation not in OPERATIONS:
        raise ValueError(f"{wish.operation}: no such operation. HINT: {', '.join(OPERATIONS)}")
    words = ["--operation", wish.operation, "--sizes", *map(str, wish.sizes)]
    enough = wish.hosts is not None or wish.ranks <= len(os.sched_getaffinity(0))
    bind = wish.bind or ("core" if enough else "none")
    say(f"{wish.operation} on {wish.ranks} ranks: {len(wish.sizes)} sizes")
    code, found = summary_of(
        Job(PROBE, words, True, bind=bind, hang_timeout=0.0),
        lambda job: start(job, wish.ranks, wish.hosts, wish.hostfile, wish.launcher, []),
    )
    if found is None:
        raise ValueError(f"nothing was measured: the ranks ended with exit code {code}")
    notes: list[str] = []
    more: dict[str, Any] = {}
    if wish.hosts is None and wish.hostfile is None:
        more, why = _mpi(wish, words, say)
        notes += [f"MPI was not measured: {why}"] if why else []
    told = [*found["collectives"], *more.get("collectives", [])]
    copies = [build(AtSize, one, "", []) for one in found["copies"]]
    return Benched([build(Collective, one, "", []) for one in told], copies, notes)


def _mpi(wish: Wish, words: list[str], say: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """What mpirun's ranks found, or why not."""
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    if find_spec("mpi4py") is None or launcher is None:
        return {}, "it needs mpi4py and mpirun. HINT: pip install mpi4py, and a module"
    say("the same through MPI")
    # Open MPI's own word for ranks beyond the cores, which ours may have as well.
    environment = {**os.environ, "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    command = [launcher, "-n", str(wish.ranks), sys.executable, "-m", PROBE, "--mpi", *words]
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
        return {}, f"{launcher} ended with {done.returncode}: {first}"
    return dict(json.loads(lines[0])), ""


def merged(machine: Machine, found: list[Collective]) -> Machine:
    """The machine with these collectives in the place of older ones of the same groups."""

    def key(one: Collective) -> tuple[object, ...]:
        return one.group, one.operation, one.ranks, one.hosts, one.backend

    new = {key(one) for one in found}
    kept = [one for one in machine.collectives if key(one) not in new]
    return replace(machine, collectives=(*kept, *found))
