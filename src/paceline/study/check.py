"""``paceline check``: run a measuring job on all reachable hosts and return the machine file."""

import os
import shlex
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..cluster.topology.racks import RACKS_VARIABLE
from ..cost.machine.dataclass_tree import from_tree
from ..cost.machine.machine_file import Machine
from ..launch.job import Job
from ..launch.options import LaunchOptions, NodeOptions
from ..launch.start import start
from .rank_summary import run_and_read_summary

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


def check(wish: CheckRequest) -> CheckResults:
    """Measure all hosts that answer; hosts that do not answer are listed in the machine file.

    Raises:
        ValueError: An option is invalid, or nothing could be measured.
    """
    if wish.folder is not None and not wish.folder.is_dir():
        raise ValueError(f"--data {wish.folder} is not a folder. HINT: give one that all hosts see")
    arguments = ["--quick"] * wish.quick
    if wish.folder is not None:
        arguments += ["--data", str(wish.folder.absolute())]
    without: dict[str, str] = {}
    job = Job(PROBE, arguments, True, bind="none", hang_timeout=0.0)

    variables = [*(wish.nodes.env or []), *[RACKS_VARIABLE] * bool(os.environ.get(RACKS_VARIABLE))]
    options = LaunchOptions(
        wish.ranks,
        replace(wish.nodes, env=variables),
        min_ranks_per_host=RANKS,
        excluded_hosts=without,
    )
    code, found = run_and_read_summary(job, lambda job: start(job, options))
    if found is None:
        raise ValueError(
            f"nothing was measured, because the ranks of the check ended with exit code {code}. "
            "HINT: their error is above; paceline run -m paceline.study.probe --quick repeats the "
            "measurements without a machine file"
        )
    return CheckResults(*_read(found, without, wish), code)


def _read(
    found: dict[str, Any], without: dict[str, str], wish: CheckRequest
) -> tuple[Machine, dict[str, dict[str, Any]], list[str]]:
    more = {host["name"]: host.pop("more", {}) for host in found["hosts"]}
    words = ["paceline", "check", *(["-H", hosts] if (hosts := wish.nodes.hosts) else [])]
    words += ["--data", str(wish.folder)] if wish.folder else []
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
