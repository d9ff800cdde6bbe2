"""The report of ``--report-bindings``: the cores to which ranks, their threads and their loader
workers are bound, as read from the kernel after training has begun.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ...cluster.binding_plan import GPU, RankBinding, threads_near_card, visible_gpus
from ...cluster.topology.local_resources import allowed_threads
from ...cluster.topology.pci_devices import Card, pci_cards
from ...cluster.topology.topology import Topology, topology
from ...cluster.topology.visible_gpus import visible_devices
from ...plurals import counted, format_ranges, named_ranks, parse_ranges
from ..layout import Seat
from ..linux_processes import child_pids
from ..monitor.progress import ProgressReport

EARLY_REPORT_S = 10.0  # after the start: a first report, if no step has been recorded by then
# Between two polls; one interval after the first step, loader workers and threads exist.
POLL_INTERVAL_S = 0.25


# CPU affinity and memory policy of running processes and their threads, read from /proc.


@dataclass(frozen=True)
class Process:
    """The CPU affinity and memory policy of one process.

    Attributes:
        name: Name of its command.
        cpus: Affinity of its first thread, such as "0-3,8".
        threads: Number of its threads.
        memory: Memory policy, such as "default" or "prefer:0"; empty if it cannot be read.
        others: Number of threads for each other affinity.
    """

    pid: int
    name: str
    cpus: str
    threads: int
    memory: str
    others: dict[str, int] = field(default_factory=dict)


def read_process(pid: int) -> Process | None:
    """Return the affinity of a process, or None if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        name = (folder / "comm").read_text().strip()
        masks = {int(task): _mask(folder / "task" / task) for task in os.listdir(folder / "task")}
    except OSError:
        return None
    first = masks.get(pid, "")
    others = Counter(mask for mask in masks.values() if mask not in (first, ""))
    return Process(pid, name, first, len(masks), _policy(folder), dict(others))


def child_processes(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    children = child_pids(pid)
    return sorted([*children, *(pid for child in children for pid in child_processes(child))])


def _mask(task: Path) -> str:
    """Return the affinity of a thread; empty if the thread has ended."""
    try:
        for line in (task / "status").read_text().splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def _policy(folder: Path) -> str:
    """Return the memory policy of the heap, which follows the process's policy."""
    try:
        for line in (folder / "numa_maps").read_text().splitlines():
            fields = line.split()
            if len(fields) > 1 and ("heap" in fields or "stack" in fields):
                return fields[1]
    except OSError:
        pass
    return ""


class Host(Protocol):
    """A node on which ranks run."""

    name: str

    def progress(self) -> ProgressReport: ...
    def bindings(self) -> dict[str, Any]: ...


def report_host(
    places: Sequence[RankBinding], pids: Mapping[int, tuple[int, int]], smt: bool | None = None
) -> dict[str, Any]:
    """Return this host's cores, and each rank's planned and actual placement.

    Args:
        places: Planned placement, by local rank.
        pids: PID and local rank of each rank.
        smt: Value with which the placement was planned.
    """
    host, near = topology(), pci_cards()
    ranks, found = [], []
    for rank, (pid, local) in sorted(pids.items()):
        process = read_process(pid)
        if process is None:
            continue
        below = [*filter(None, map(read_process, child_processes(pid)))]
        planned = places[local]
        cpus = tuple(parse_ranges(process.cpus))
        homes, packages = host.numa_nodes(cpus), host.packages(cpus)
        found.append(replace(planned, cpus=cpus, packages=packages, nodes=homes))
        ranks.append(
            {
                "rank": rank,
                "planned": asdict(planned),
                "packages": packages,
                "nodes": homes,
                "gpu": _gpu(planned, [card.name for card in near if card.kind == "gpu"]),
                "process": asdict(process),
                "children": [*map(asdict, below)],
                "odd": misplaced(planned, process, below),
            }
        )
    return {
        "cpus": [[cpu.package, cpu.node, cpu.core, cpu.number] for cpu in host.cpus],
        "allowed": allowed_threads(),
        "ranks": ranks,
        "numbers": [entry["rank"] for entry in ranks],
        "odd": binding_problems(
            found,
            host,
            near,
            allowed=set(allowed_threads()),
            visible=visible_devices(os.environ),
            smt=smt,
        ),
        "notes": list(dict.fromkeys(note for place in places for note in place.notes)),
    }


def misplaced(planned: RankBinding, found: Process, below: Sequence[Process]) -> list[str]:
    """Describe threads and children of a rank that are not bound as planned."""
    problems = []
    wanted = set(planned.cpus)
    if wanted and set(parse_ranges(found.cpus)) != wanted:
        problems.append(f"is bound to {found.cpus}, not to the planned cores")
    for where, count in found.others.items():
        problems.append(f"{count} of its {found.threads} threads are bound to {where}")
    return problems + [
        f"its child process {child.name} {child.pid} is bound to {child.cpus}"
        for child in below
        if child.cpus != found.cpus
    ]


def _gpu(place: RankBinding, names: Sequence[str]) -> str:
    which = visible_devices(os.environ)
    if place.device is None:
        return ""
    number = which[place.device] if place.device < len(which) else -1
    return names[number] if 0 <= number < len(names) else ""


# Likely mistakes of a plan, or of bindings that were read back from running ranks.


def binding_problems(
    places: Sequence[RankBinding],
    topology: Topology,
    cards: Sequence[Card] = (),
    *,
    allowed: set[int] | None = None,
    visible: list[int] | None = None,
    smt: bool | None = None,
) -> list[str]:
    """Return descriptions of likely binding mistakes, for the user.

    Ranks of a host are numbered from 0. With ``smt=True``, one thread on every hardware thread is
    not reported.
    """
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        for problem in _problems_of_rank(place, topology, allowed, visible_gpus(cards, visible)):
            ranks_by_problem.setdefault(problem, []).append(rank)
    found = [f"{named_ranks(ranks)}: {problem}" for problem, ranks in ranks_by_problem.items()]
    ranks_by_mask: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        ranks_by_mask.setdefault(tuple(sorted(place.cpus)), []).append(rank)
    for mask, ranks in ranks_by_mask.items():
        cores = topology.cores(mask)
        threads = sum(places[rank].threads for rank in ranks)
        if threads > (len(topology.at(mask)) if smt else len(cores)):
            cores_text = counted(len(cores), "core")
            found.append(
                f"{named_ranks(ranks)}: {counted(threads, 'thread')} on {cores_text} "
                f"({format_ranges(list(mask))})"
            )
    return found + _overlaps(places, topology)


def _problems_of_rank(
    place: RankBinding, topology: Topology, allowed: set[int] | None, gpus: list[GPU]
) -> list[str]:
    found = []
    known = {cpu.number for cpu in topology.cpus}
    unknown = set(place.cpus) - known
    if unknown:
        found.append(
            f"this node does not have the hardware threads {format_ranges(sorted(unknown))}"
        )
    if allowed is not None and set(place.cpus) & known - allowed:
        outside = sorted(set(place.cpus) & known - allowed)
        found.append(f"hardware threads {format_ranges(outside)} are not granted to this job")
    packages = topology.packages(place.cpus)
    if len(packages) > 1:
        found.append(f"over sockets {format_ranges(list(packages))}")
    card = None
    if place.device is not None and place.device < len(gpus):
        card = gpus[place.device].card
    if card is not None:
        near = topology.packages(threads_near_card(topology, card))
        if near and packages and not set(near) & set(packages):
            found.append(
                f"on socket {format_ranges(list(packages))}, its GPU {card.name} on socket "
                f"{format_ranges(list(near))}"
            )
    return found


def _overlaps(places: Sequence[RankBinding], topology: Topology) -> list[str]:
    """Describe ranks that share only some of their cores.

    Ranks that share all their cores are not reported: this is intended.
    """
    ranks_by_core: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        for core in topology.cores(place.cpus):
            ranks_by_core.setdefault(core, []).append(rank)
    cores_by_ranks: dict[tuple[int, ...], list[int]] = {}
    for core, ranks in ranks_by_core.items():
        if len({tuple(sorted(places[rank].cpus)) for rank in ranks}) > 1:
            cores_by_ranks.setdefault(tuple(ranks), []).append(core)
    found = []
    for ranks_on, cores in cores_by_ranks.items():
        cpus = [cpu.number for cpu in topology.cpus if cpu.core in cores]
        where = "the same core" if len(cores) == 1 else f"the same {len(cores)} cores"
        found.append(
            f"{named_ranks(list(ranks_on))}: on {where} (hardware threads {format_ranges(cpus)})"
        )
    return found


class BindingsReport:
    """The report of the bindings, printed after the first step.

    A script that records no steps, or starts slowly, gets a report after EARLY_REPORT_S. It is
    repeated after the first step, because threads and loader workers may have started since.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._started_at = self._checked_at = time.monotonic()
        self._stepped_at: float | None = None
        self._has_early_report = self._is_final = False

    def check(self, hosts: Sequence[Host], seats: Sequence[Seat]) -> None:
        """Print the report if it is due: after the first step, and after EARLY_REPORT_S without."""
        now = time.monotonic()
        if self._is_final or now - self._checked_at < POLL_INTERVAL_S:
            return
        self._checked_at = now
        if self._stepped_at is None and all(host.progress().has_stepped for host in hosts):
            self._stepped_at = now
        if self._stepped_at is not None:
            self._is_final = now - self._stepped_at >= POLL_INTERVAL_S
            due = self._is_final
        else:
            due = not self._has_early_report and now - self._started_at > EARLY_REPORT_S
            self._has_early_report = self._has_early_report or due
        if not due:
            return
        from ...report.terminal.bindings import render

        used = sorted({seat.host for seat in seats})
        bindings = [(hosts[number].name, hosts[number].bindings()) for number in used]
        self._say(render(bindings, len(seats), stepped=self._is_final))

    def end(self) -> None:
        """Print a message if the ranks ended before the report."""
        if not (self._is_final or self._has_early_report):
            self._say(
                "paceline: --report-bindings: the ranks ended before their bindings were read, "
                "half a second after the first step. HINT: run more steps\n"
            )
