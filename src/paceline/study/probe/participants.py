"""Run the measurements of ``paceline check`` on all ranks, one after another.

Rank 0 waits for every host, and continues without hosts that do not answer in time. Results pass
through the job's store, so that a hanging host does not block the others.
"""

import datetime
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

REGISTRATION_TIMEOUT_S = 300.0  # seconds until all ranks must have registered
POLL_INTERVAL_S = 0.01  # polling interval for answers, in seconds
EXTRA_TIMEOUT_S = 60.0  # seconds that the others wait for rank 0 longer than rank 0 waits for them


@dataclass(frozen=True)
class ProbeHost:
    """One host of the job.

    Attributes:
        name: Unique name of the host.
        machine: Boot ID; hosts that are containers or namespaces of one machine share it.
        turn: Position among the hosts of the same machine, which measure one after another.
        ranks: Global ranks on this host.
        cpus: Hardware threads that these ranks may run on together.
        gpus: Whether each rank has a GPU of its own.
    """

    name: str
    machine: str
    turn: int
    ranks: tuple[int, ...]
    cpus: tuple[int, ...]
    gpus: bool

    @property
    def leader(self) -> int:
        """Return the rank that measures for its host."""
        return self.ranks[0]


@dataclass(frozen=True)
class MeasurementResults:
    """Results of one measurement, by host name.

    Attributes:
        values: Return value of the leader's measurement.
        errors: Error message of hosts on which the measurement failed.
    """

    values: dict[str, Any]
    errors: dict[str, str]


class HostDropped(Exception):  # noqa: N818 - nothing went wrong in this rank
    """Raised on the ranks of a host that was too slow; the other hosts continue without it."""


class Participants:
    """The ranks of a check, from one rank's point of view.

    Attributes:
        hosts: Hosts that still take part; the same on all ranks.
        host: The host of this rank.
        unresponsive: Hosts that did not answer, with the reason; filled on rank 0 only.
    """

    def __init__(self, store: Any, rank: int, size: int, about: dict[str, Any]) -> None:
        """Register this rank and wait for the list of hosts.

        Args:
            about: This rank's "host" (any key that identifies it), "name", "machine", "cpus"
                and "gpu" (an identifier, or "").
        """
        self.store, self.rank = store, rank
        self.unresponsive: dict[str, str] = {}
        store.set(f"who/{rank}", json.dumps(about))
        if rank == 0:
            keys = [f"who/{other}" for other in range(size)]
            store.wait(keys, datetime.timedelta(seconds=REGISTRATION_TIMEOUT_S))
            hosts = group_ranks_by_host([json.loads(store.get(key)) for key in keys])
            store.set("hosts", json.dumps([asdict(host) for host in hosts]))
        known = self._get("hosts", REGISTRATION_TIMEOUT_S + EXTRA_TIMEOUT_S)
        self.hosts = [
            ProbeHost(**{**host, "ranks": tuple(host["ranks"]), "cpus": tuple(host["cpus"])})
            for host in known
        ]
        self.host = next(host for host in self.hosts if rank in host.ranks)

    @property
    def leaders(self) -> list[int]:
        return [host.leader for host in self.hosts]

    def measure(
        self,
        name: str,
        measurement: Callable[[], Any],
        seconds: float,
        ranks: Iterable[int] | None = None,
        *,
        one_host_at_a_time: bool = True,
    ) -> MeasurementResults:
        """Run one measurement and wait on all ranks until it has ended.

        Args:
            measurement: Its return value must be serializable as JSON.
            seconds: Seconds that rank 0 waits for each turn.
            ranks: Ranks that measure; None means the hosts' leaders.
            one_host_at_a_time: Whether hosts of one machine measure one after another.

        Returns:
            The results of the leaders on rank 0; an empty ``MeasurementResults`` on other ranks.

        Raises:
            HostDropped: This host did not answer in time.
        """
        members = set(self.leaders if ranks is None else ranks)
        turns = sorted({host.turn for host in self.hosts}) if one_host_at_a_time else [None]
        found: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for turn in turns:
            mine = turn is None or self.host.turn == turn
            if self.rank in members and mine:
                self.store.set(f"{name}/{self.rank}", json.dumps(_run(measurement)))
            if self.rank == 0:
                now = [host for host in self.hosts if turn is None or host.turn == turn]
                self._collect(name, now, members, seconds, found, failed)
                self.store.set(f"{name}/turn {turn}", json.dumps(list(self.unresponsive)))
            gone = self._get(f"{name}/turn {turn}", seconds + EXTRA_TIMEOUT_S)
            if self.host.name in gone:
                raise HostDropped
            self.hosts = [host for host in self.hosts if host.name not in gone]
        return MeasurementResults(found, failed)

    def _collect(
        self,
        name: str,
        hosts: list[ProbeHost],
        members: set[int],
        seconds: float,
        found: dict[str, Any],
        failed: dict[str, str],
    ) -> None:
        deadline = time.monotonic() + seconds
        for host in hosts:
            keys = [f"{name}/{rank}" for rank in host.ranks if rank in members]
            if not keys:
                continue
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)  # store.wait prints warnings when it times out
            if not self.store.check(keys):
                self.unresponsive[host.name] = (
                    f"no answer within {seconds:.0f} s (measurement: {name})"
                )
                continue
            answers = [json.loads(self.store.get(key)) for key in keys]
            mistakes = [answer["failed"] for answer in answers if "failed" in answer]
            if mistakes:
                failed[host.name] = mistakes[0]
            elif host.leader in members:
                found[host.name] = answers[0]["found"]

    def _get(self, key: str, seconds: float) -> Any:
        self.store.wait([key], datetime.timedelta(seconds=seconds))
        return json.loads(self.store.get(key))


def _run(measurement: Callable[[], Any]) -> dict[str, Any]:
    """Run a measurement; an exception is returned as text, so that the check continues."""
    try:
        return {"found": measurement()}
    except ValueError as error:
        return {"failed": str(error)}
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return {"failed": f"{type(error).__name__}: {first}"}


def group_ranks_by_host(ranks: list[dict[str, Any]]) -> list[ProbeHost]:
    """Return the hosts of these ranks, in the order of their first ranks.

    A name that several hosts have gets a number, because later steps identify hosts by name.
    """
    members: dict[Any, list[int]] = {}
    for rank, about in enumerate(ranks):
        members.setdefault(about["host"], []).append(rank)
    names: Counter[str] = Counter()
    machines: Counter[str] = Counter()
    found = []
    for own in members.values():
        first = ranks[own[0]]
        name, machine = first["name"], first["machine"]
        names[name] += 1
        unique = name if names[name] == 1 else f"{name} ({names[name]})"
        cpus = sorted({cpu for rank in own for cpu in ranks[rank]["cpus"]})
        own_gpus = [ranks[rank]["gpu"] for rank in own]
        gpus = all(own_gpus) and len(set(own_gpus)) == len(own_gpus)
        found.append(ProbeHost(unique, machine, machines[machine], tuple(own), tuple(cpus), gpus))
        machines[machine] += 1
    return found
