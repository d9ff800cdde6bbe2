"""One rank of a check: ``paceline run -m paceline.study.probe [--data DIR] [--quick]``.

Rank 0 sends the results of all ranks to the launcher, for the file of its ``--json``; without a
launcher it prints them. Exit code 3: the results are complete except for hosts that did not answer,
whose ranks may not end without a signal.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from ...cluster.rank_identity import RankIdentity, rank_identity
from ...cluster.topology.local_resources import allowed_threads
from ...cluster.topology.racks import spread_over_switches
from ...cluster.topology.topology import topology
from ...cost.machine.dataclass_tree import to_tree
from ...launch.linux_processes import exit_on_signal, signals_handled
from ...record.ring.launcher_messages import notify, send_to_launcher
from ...record.ring.recorder import Recorder
from ...world.process_group import gpu_identifier, join_process_group, select_device
from .measure import host_facts
from .measure.device_speed import arithmetic, triad
from .measure.import_time import import_torch
from .measure.links import EVERY_PAIR, QUICK, SIZES, Members, collectives, pairs
from .measure.storage import storage
from .participants import HostDropped, MeasurementResults, Participants, ProbeHost

SOME_SILENT = 3  # exit code
QUICK_SECONDS = 6.0
USUAL_SECONDS = 30.0  # seconds of measuring that the budgets below refer to
JOIN_SECONDS = 300.0
PATIENCE = 40.0  # seconds allowed for a step in addition to its planned duration


# Results of all steps as one dictionary of plain values, for the launcher.
#
# hosts: HostFacts, each with "more", facts that the machine file format has no field for.
# collectives, pairs: as in cost.machine. unreachable: Hosts that did not answer, each with the
# reason. notes: Failures and remarks, each with "hosts", "measure" and "text".

# The field of HostFacts that a step measures, where its name differs from the step's.
FIELDS = {"import torch": "import_torch", "clocks": "clock_offset_s"}


class Summary:
    """Collector of the results of all steps."""

    def __init__(self, hosts: Sequence[ProbeHost], folder: Path | None) -> None:
        self._hosts: dict[str, dict[str, Any]] = {
            host.name: {"name": host.name, "more": {"machine": host.machine}} for host in hosts
        }
        self._collectives: list[Any] = []
        self._pairs: list[Any] = []
        self._notes: list[dict[str, Any]] = []
        machines: dict[str, list[str]] = {}
        for host in hosts:
            machines.setdefault(host.machine, []).append(host.name)
        for names in machines.values():
            if len(names) > 1:
                text = "are on one machine, so each was measured alone, one after the other"
                self._note(names, "machine", text)
        if folder is not None and len(machines) > 1:
            text = f"{folder} was measured from {len(machines)} machines at the same time"
            self._note(list(self._hosts), "storage", text)
        if len(hosts) > EVERY_PAIR:
            text = f"not all pairs of the {len(hosts)} hosts were measured"
            self._note(list(self._hosts), "pairs", f"{text}: neighbours and some others")

    def facts(self, results: MeasurementResults) -> None:
        for name, (found, more) in results.values.items():
            own = self._hosts[name]
            self._hosts[name] = {**own, **found, "more": {**own["more"], **more}}
        self._failed("facts", results)
        racks = {name: own["more"].get("leaf_switch", "") for name, own in self._hosts.items()}
        if spread := spread_over_switches(racks):
            self._note(list(racks), "switches", spread)

    def imports(self, results: MeasurementResults) -> None:
        for name, found in results.values.items():
            own = self._hosts[name]
            own["import_torch"] = found["seconds"]
            for part in ("busy", "first_s", "first_busy_s", "calls"):
                own[f"import_torch_{part}"] = found[part]
            own["more"] |= {"import_torch_calls_by": found["counted_by"]}
        self._failed("import torch", results)

    def part(self, field: str, results: MeasurementResults) -> None:
        """Add a step's results that form one list field of HostFacts."""
        for name, found in results.values.items():
            self._hosts[name][field] = found
        self._failed(field, results)

    def offsets(self, results: MeasurementResults) -> None:
        for found in results.values.values():
            for name, (offset, uncertainty) in found.items():
                self._hosts[name]["clock_offset_s"] = offset
                self._hosts[name]["clock_uncertainty_s"] = uncertainty
        self._failed("clocks", results)

    def links(self, measure: str, results: MeasurementResults) -> None:
        """Add the collectives, or the pairs of hosts, that a step has measured."""
        found = self._pairs if measure == "links" else self._collectives
        found += [link for links in results.values.values() for link in links]
        self._failed(measure, results)

    def as_json(self, silent: dict[str, str]) -> dict[str, Any]:
        return {
            "hosts": list(self._hosts.values()),
            "collectives": self._collectives,
            "pairs": self._pairs,
            "unreachable": silent,
            "notes": self._notes,
        }

    def _note(self, hosts: list[str], measure: str, text: str) -> None:
        self._notes.append({"hosts": hosts, "measure": measure, "text": text})

    def _failed(self, measure: str, results: MeasurementResults) -> None:
        """Add a note for each reason of failure; hosts with the same reason share one note."""
        alike: dict[str, list[str]] = {}
        for name, why in results.errors.items():
            alike.setdefault(why, []).append(name)
            own = self._hosts[name]
            if not measure.startswith(("collectives", "links")):
                field = FIELDS.get(measure, measure)
                own["missing"] = {**own.get("missing", {}), field: why}
        for why, names in alike.items():
            self._note(names, measure, why)


# Clock offset of each host relative to the first host.
#
# The first host requests each host's time repeatedly and uses the answer with the shortest round
# trip, which has the smallest uncertainty.

PINGS = 30

# (offset, uncertainty) in seconds
Offset = tuple[float, float]


def offsets(hosts: Sequence[ProbeHost], rank: int, group: Any) -> dict[str, Offset]:
    """Return each host's offset and uncertainty by name; empty except on the first host's leader.

    The leaders of the other hosts answer. ``group`` is the group of all leaders.
    """
    first, *others = hosts
    if rank != first.leader:
        for _ in range(PINGS):
            _answer(first.leader, group)
        return {}
    found = {first.name: (0.0, 0.0)}
    for host in others:
        found[host.name] = min(
            (_ask(host.leader, group) for _ in range(PINGS)), key=lambda offset: offset[1]
        )
    return found


def _ask(other: int, group: Any) -> Offset:
    theirs = torch.zeros(1, dtype=torch.float64)
    sent = time.time()
    dist.send(theirs, other, group=group)
    dist.recv(theirs, other, group=group)
    back = time.time()
    return float(theirs) - (sent + back) / 2, max(0.0, (back - sent) / 2)


def _answer(first: int, group: Any) -> None:
    mine = torch.zeros(1, dtype=torch.float64)
    dist.recv(mine, first, group=group)
    mine[0] = time.time()
    dist.send(mine, first, group=group)


# Groups of ranks that measure links: ranks of one host, leaders of the hosts, all ranks.

TIMEOUT_S = 30.0  # of a collective


class Groups:
    """The measurements of links, to be passed to ``Participants.measure``.

    They return lists of cost.machine's dataclasses as plain values.

    Call ``in_host`` and ``all_ranks`` on every rank before the measurements of leaders only:
    PyTorch derives the name of a new group from its ranks and from the number of groups that a
    rank already has, and all members must derive the same name.
    """

    def __init__(self, participants: Participants, seconds: float, quick: bool) -> None:
        self.participants, self.seconds = participants, seconds
        self.sizes = QUICK if quick else SIZES
        self._made: dict[tuple[int, ...], Members] = {}

    def in_host(self) -> Any:
        """Measure the collectives in this host; with one rank, only create the group."""
        host = self.participants.host
        return self._collectives("in host", host.ranks, (host.name,))

    def between(self) -> Any:
        return self._collectives("between hosts", tuple(self.participants.leaders), self._names())

    def all_ranks(self) -> Any:
        ranks = tuple(rank for host in self.participants.hosts for rank in host.ranks)
        return self._collectives("all", ranks, self._names())

    def pairs(self) -> Any:
        ranks = self.participants
        members = self._members(tuple(ranks.leaders))
        return to_tree(pairs(ranks.hosts, ranks.rank, members.group, members.device))

    def offsets(self) -> Any:
        ranks = self.participants
        return offsets(ranks.hosts, ranks.rank, self._members(tuple(ranks.leaders)).group)

    def _names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.participants.hosts)

    def _collectives(self, name: str, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> Any:
        members = self._members(ranks)
        if len(ranks) == 1:
            return []
        found = collectives(members, name, hosts, self.seconds, self.sizes)
        return to_tree(found) if self.participants.rank == ranks[0] else []

    def _members(self, ranks: tuple[int, ...]) -> Members:
        """Return the group. Only its members create it: other hosts may no longer answer."""
        if ranks not in self._made:
            group = dist.new_group(
                list(ranks),
                timeout=datetime.timedelta(seconds=TIMEOUT_S),
                use_local_synchronization=True,
            )
            gpus = all(host.gpus for host in self.participants.hosts)
            device = torch.device("cuda", torch.cuda.current_device()) if gpus else "cpu"
            self._made[ranks] = Members(group, len(ranks), torch.device(device))
        return self._made[ranks]


def check(folder: Path | None, seconds: float, quick: bool) -> dict[str, Any] | None:
    """Measure together with the other ranks of the job.

    Args:
        folder: Folder whose storage is measured; None measures no storage.
        seconds: Approximate time for the measurements.
        quick: Measure fewer sizes, and ``import torch`` only once.

    Returns:
        The summary on rank 0, None on other ranks.

    Raises:
        HostDropped: This host was too slow, and the other hosts continue without it.
    """
    who = rank_identity(dict(os.environ))
    join_process_group(who, Recorder(who.rank, who.size, enabled=False), JOIN_SECONDS)
    # The job's store; a process that is not part of a job creates one in memory.
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else HashStore()
    participants = Participants(
        PrefixStore("paceline/check", store), who.rank, who.size, _about(who)
    )
    measures = Measures(participants, folder, seconds / USUAL_SECONDS, quick)
    measures.of_hosts()
    measures.of_links()
    return measures.summary.as_json(participants.unresponsive) if who.rank == 0 else None


def _about(who: RankIdentity) -> dict[str, Any]:
    return {
        "host": os.environ.get("GROUP_RANK", socket.gethostname()),
        "name": socket.gethostname(),
        "machine": host_facts.boot_id(),
        "cpus": allowed_threads(),
        "gpu": _take_gpu(who.local_rank) if dist.is_nccl_available() else "",
    }


def _take_gpu(local_rank: int) -> str:
    """Make this rank's GPU the current one, and return its identifier; "" if there is none."""
    try:
        device = select_device(local_rank, None)
    except ValueError:  # more ranks than GPUs
        return ""
    if device.type != "cuda":
        return ""
    return gpu_identifier(device) or str(device)


class Measures:
    """The steps of a check. Rank 0 collects their results in ``summary``."""

    def __init__(
        self, participants: Participants, folder: Path | None, scale: float, quick: bool
    ) -> None:
        self.participants, self.folder, self.scale, self.quick = participants, folder, scale, quick
        self.summary = Summary(participants.hosts, folder)
        self.groups = Groups(participants, 0.6 * scale, quick)

    def of_hosts(self) -> None:
        """Run the measurements that each host's leader makes while its other ranks wait."""
        participants, host, scale = self.participants, self.participants.host, self.scale
        threads = max(1, len(topology().cores(host.cpus)))
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]

        def own_facts() -> Any:
            own = host_facts.host_facts(host.name, len(host.ranks), host.cpus, self.folder)
            return [to_tree(own), host_facts.extra_facts(self.folder)]

        def imports() -> Any:
            found = import_torch(1, count=False) if self.quick else import_torch()
            return to_tree(found)

        def computing() -> Any:
            with _on(host.cpus):
                found = arithmetic("cpu", 0.8 * scale, threads)
                for device in devices:
                    found += arithmetic(device, 0.1 * scale)
            return to_tree(found)

        def memory() -> Any:
            with _on(host.cpus):
                found = [triad("cpu", 0.8 * scale, host.cpus, threads)]
                found += [triad(device, 0.1 * scale) for device in devices]
            return to_tree(found)

        def folders() -> Any:
            assert self.folder is not None
            # Only here: while a rank waits for others in C++ code, Python handles signals too late.
            with signals_handled(exit_on_signal, (signal.SIGTERM,)):
                return [to_tree(storage(self.folder, 1.5 * scale))]

        def measured(what: str, measurement: Any, wait_s: float) -> MeasurementResults:
            self._say(what if what != "storage" else f"storage of {self.folder}")
            at_a_time = what != "facts"
            return participants.measure(what, measurement, wait_s, one_host_at_a_time=at_a_time)

        self.summary.facts(measured("facts", own_facts, PATIENCE))
        self.summary.imports(measured("import torch", imports, 3 * PATIENCE))
        patience = PATIENCE + 20 * scale
        parts = {"arithmetic": computing, "memory": memory, "storage": folders}
        for part, measurement in parts.items():
            if part != "storage" or self.folder is not None:
                self.summary.part(part, measured(part, measurement, patience))

    def of_links(self) -> None:
        """Run the measurements between ranks: in each host, between hosts, and of all ranks."""
        participants, groups = self.participants, self.groups
        patience = PATIENCE + 60 * self.scale

        def measured(
            what: str, words: str, measurement: Any, wait_s: float = patience, by_all: bool = False
        ) -> MeasurementResults:
            self._say(words)
            ranks = [rank for host in participants.hosts for rank in host.ranks]
            in_turn = what == "collectives in host"
            return participants.measure(
                what, measurement, wait_s, ranks if by_all else None, one_host_at_a_time=in_turn
            )

        def has_several_ranks() -> bool:
            return any(len(host.ranks) > 1 for host in participants.hosts)

        if has_several_ranks():
            what = "collectives in host"
            found = measured(what, "collectives in each host", groups.in_host, by_all=True)
            self.summary.links(what, found)
        if len(participants.hosts) > 1 and has_several_ranks():
            what = "collectives of all"
            found = measured(what, "collectives of all ranks", groups.all_ranks, by_all=True)
            self.summary.links(what, found)
        if len(participants.hosts) > 1:
            self.summary.offsets(measured("clocks", "clocks", groups.offsets))
            found = measured("links", "links between hosts", groups.pairs, 2 * patience)
            self.summary.links("links", found)
            what = "collectives between hosts"
            self.summary.links(what, measured(what, what, groups.between))

    def _say(self, what: str) -> None:
        if self.participants.rank == 0:
            notify(f"paceline check: {what} ...\n")


@contextlib.contextmanager
def _on(cpus: tuple[int, ...]) -> Iterator[None]:
    """Bind this thread, and threads that it starts, to all hardware threads of the host's ranks."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
        yield
    finally:
        os.sched_setaffinity(0, before)


def main() -> int:
    """Measure, send the results and return the exit code."""
    parser = argparse.ArgumentParser(prog="paceline.study.probe", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder whose storage is measured")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"approximate time for the measurements (default: {USUAL_SECONDS:g})",
    )
    parser.add_argument("--quick", action="store_true", help="measure fewer sizes and repetitions")
    given = parser.parse_args()
    seconds = given.seconds or (QUICK_SECONDS if given.quick else USUAL_SECONDS)
    try:
        found = check(given.data, seconds, given.quick)
    except HostDropped:
        return 0
    if found is None:
        return 0
    text = json.dumps(found)
    if not send_to_launcher(summary=text):
        print(text)
    return SOME_SILENT if found["unreachable"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
