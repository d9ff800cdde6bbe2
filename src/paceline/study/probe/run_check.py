"""The sequence of measurements of ``paceline check``, as each rank runs it."""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from ...cluster.rank_identity import RankIdentity, rank_identity
from ...cluster.topology.local_resources import allowed_threads
from ...cluster.topology.topology import topology
from ...cost.machine.dataclass_tree import to_tree
from ...record.ring.launcher_messages import notify
from ...record.ring.recorder import Recorder
from ...world.process_group import gpu_identifier, join_process_group, select_device
from .groups import Groups
from .measure import host_facts
from .measure.arithmetic import arithmetic
from .measure.import_time import import_torch
from .measure.memory_bandwidth import triad
from .measure.storage import storage
from .participants import Participants
from .summary import Summary

USUAL = 30.0  # seconds of measuring that the budgets below refer to
JOIN_SECONDS = 300.0
PATIENCE = 40.0  # seconds allowed for a step in addition to its planned duration


def check(folder: Path | None, seconds: float, quick: bool) -> dict[str, Any] | None:
    """Measure together with the other ranks of the job.

    Args:
        folder: Folder whose storage is measured; None measures no storage.
        seconds: Approximate time for the measurements.
        quick: Measure fewer sizes, and ``import torch`` only once.

    Returns:
        The summary (see summary.py) on rank 0, None on other ranks.

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
    measures = Measures(participants, folder, seconds / USUAL, quick)
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
            with _ended_gently():
                return [to_tree(storage(self.folder, 1.5 * scale))]

        self._say("facts")
        self.summary.facts(
            participants.measure("facts", own_facts, PATIENCE, one_host_at_a_time=False)
        )
        self._say("import torch")
        self.summary.imports(participants.measure("import torch", imports, 3 * PATIENCE))
        self._say("arithmetic")
        patience = PATIENCE + 20 * scale
        self.summary.part("arithmetic", participants.measure("arithmetic", computing, patience))
        self._say("memory")
        self.summary.part("memory", participants.measure("memory", memory, patience))
        if self.folder is not None:
            self._say(f"storage of {self.folder}")
            self.summary.part("storage", participants.measure("storage", folders, patience))

    def of_links(self) -> None:
        """Run the measurements between ranks: in each host, between hosts, and of all ranks."""
        participants, groups = self.participants, self.groups
        patience = PATIENCE + 60 * self.scale
        everyone = [rank for host in participants.hosts for rank in host.ranks]
        if len(participants.hosts) < len(everyone):
            self._say("collectives in each host")
            said = participants.measure("collectives in host", groups.in_host, patience, everyone)
            self.summary.collectives("collectives in host", said)
        everyone = [rank for host in participants.hosts for rank in host.ranks]
        if 1 < len(participants.hosts) < len(everyone):
            self._say("collectives of all ranks")
            said = participants.measure(
                "collectives of all", groups.all_ranks, patience, everyone, one_host_at_a_time=False
            )
            self.summary.collectives("collectives of all", said)
        if len(participants.hosts) > 1:
            self._say("clocks")
            said = participants.measure(
                "clocks", groups.offsets, patience, one_host_at_a_time=False
            )
            self.summary.offsets(said)
            self._say("links between hosts")
            said = participants.measure(
                "links", groups.pairs, 2 * patience, one_host_at_a_time=False
            )
            self.summary.pairs(said)
            self._say("collectives between hosts")
            said = participants.measure(
                "collectives between hosts", groups.between, patience, one_host_at_a_time=False
            )
            self.summary.collectives("collectives between hosts", said)

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


@contextlib.contextmanager
def _ended_gently() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that temporary files are removed.

    Only used around storage measurements: while a rank waits for others in C++ code, a Python
    signal handler would run too late.
    """
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
