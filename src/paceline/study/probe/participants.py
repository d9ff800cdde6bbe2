"""The ranks of a check, step by step: rank 0 waits for every host, and goes on without those that
do not answer in time.

What is said passes through the job's store, so that a host that stands still stops nobody."""

import datetime
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

ALL_COME = 300.0  # seconds for the ranks to introduce themselves
LOOK = 0.01  # s between two looks at who has answered
MARGIN = 60.0  # that the others wait longer for rank 0 than rank 0 for them


@dataclass(frozen=True)
class Host:
    """turn: hosts of one machine (namespaces, containers) take turns; others have turn 0."""

    name: str
    machine: str
    turn: int
    ranks: tuple[int, ...]
    cpus: tuple[int, ...]  # hardware threads that its ranks may run on together
    gpus: bool  # one for each of its ranks

    @property
    def leader(self) -> int:
        """The rank that measures for its host."""
        return self.ranks[0]


@dataclass(frozen=True)
class Said:
    """What the hosts' leaders found in one step, by the host's name."""

    found: dict[str, Any]
    failed: dict[str, str]


class Dropped(Exception):  # noqa: N818 - nothing went wrong in this rank
    """This host was too slow: the others have gone on without it."""


class Crew:
    """As one rank sees it. ``hosts``: those that are still in, the same on all ranks."""

    def __init__(self, store: Any, rank: int, size: int, about: dict[str, Any]) -> None:
        """about: this rank's "host" (any key), "name", "machine", "cpus" and "gpu"."""
        self.store, self.rank = store, rank
        self.silent: dict[str, str] = {}  # hosts that did not answer, and why; on rank 0
        store.set(f"who/{rank}", json.dumps(about))
        if rank == 0:
            keys = [f"who/{other}" for other in range(size)]
            store.wait(keys, datetime.timedelta(seconds=ALL_COME))
            hosts = hosts_of([json.loads(store.get(key)) for key in keys])
            store.set("hosts", json.dumps([asdict(host) for host in hosts]))
        told = self._get("hosts", ALL_COME + MARGIN)
        self.hosts = [
            Host(**{**one, "ranks": tuple(one["ranks"]), "cpus": tuple(one["cpus"])})
            for one in told
        ]
        self.host = next(host for host in self.hosts if rank in host.ranks)

    @property
    def leaders(self) -> list[int]:
        return [host.leader for host in self.hosts]

    def step(
        self,
        name: str,
        work: Callable[[], Any],
        seconds: float,
        who: Iterable[int] | None = None,
        in_turns: bool = True,
    ) -> Said:
        """Let these ranks (None: the hosts' leaders) do their work, hosts of one machine one
        after another, unless not in_turns. All ranks wait for the end; rank 0 gets what the
        leaders' work returned. seconds: rank 0's patience with each turn."""
        members = set(self.leaders if who is None else who)
        turns = sorted({host.turn for host in self.hosts}) if in_turns else [None]
        found: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for turn in turns:
            mine = turn is None or self.host.turn == turn
            if self.rank in members and mine:
                self.store.set(f"{name}/{self.rank}", json.dumps(_done(work)))
            if self.rank == 0:
                now = [host for host in self.hosts if turn is None or host.turn == turn]
                self._collect(name, now, members, seconds, found, failed)
                self.store.set(f"{name}/turn {turn}", json.dumps(list(self.silent)))
            gone = self._get(f"{name}/turn {turn}", seconds + MARGIN)
            if self.host.name in gone:
                raise Dropped
            self.hosts = [host for host in self.hosts if host.name not in gone]
        return Said(found, failed)

    def _collect(
        self,
        name: str,
        hosts: list[Host],
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
                time.sleep(LOOK)  # a wait of the store's prints warnings when its time is over
            if not self.store.check(keys):
                self.silent[host.name] = f"no answer within {seconds:.0f} s: {name}"
                continue
            said = [json.loads(self.store.get(key)) for key in keys]
            mistakes = [one["failed"] for one in said if "failed" in one]
            if mistakes:
                failed[host.name] = mistakes[0]
            elif host.leader in members:
                found[host.name] = said[0]["found"]

    def _get(self, key: str, seconds: float) -> Any:
        self.store.wait([key], datetime.timedelta(seconds=seconds))
        return json.loads(self.store.get(key))


def _done(work: Callable[[], Any]) -> dict[str, Any]:
    """A measure that fails is told, and the next one made."""
    try:
        return {"found": work()}
    except ValueError as error:
        return {"failed": str(error)}
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return {"failed": f"{type(error).__name__}: {first}"}


def hosts_of(ranks: list[dict[str, Any]]) -> list[Host]:
    """The hosts of those ranks, in the order of their first ranks. A name that two have gets a
    number, as names are all that tells them apart later."""
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
        gpus = all(ranks[rank]["gpu"] for rank in own)
        found.append(Host(unique, machine, machines[machine], tuple(own), tuple(cpus), gpus))
        machines[machine] += 1
    return found
