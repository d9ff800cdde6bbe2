"""Continue a job without the hosts that it lost, and with hosts that are new.

A host that is lost, or whose ranks were the first to be killed in two attempts in a row, takes no
part in the next attempt, as long as ``--min-hosts`` remain. A host that was lost and comes back
takes part in the next attempt again, and so does one that is new (``rejoin``).
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...plurals import counted
from ...record.ring.ring import SIDECAR_SUFFIXES
from ..monitor.failures import RankStatus
from ..monitor.live_records import JobSnapshot
from ..remote.remote_host import RemoteHost
from ..remote.start_agents import name_hosts
from .rejoin import JoiningHosts

END_GRACE_S = 2.0  # for processes on an excluded host


def check_min_hosts(min_hosts: int | None, hosts: int) -> None:
    """Raise ValueError if --min-hosts asks for more hosts than the job has."""
    if min_hosts is not None and min_hosts > hosts:
        raise ValueError(
            f"--min-hosts {min_hosts}: the job has {counted(hosts, 'node')}. HINT: --min-hosts "
            f"{hosts}{' or fewer' if hosts > 1 else ''}"
        )


class RemainingHosts:
    """The hosts that remain of a job, and how many ranks each has."""

    joining_hosts: JoiningHosts | None = None  # set by the launcher

    def __init__(
        self,
        hosts: list[RemoteHost],
        ranks_per_host: list[int],
        min_hosts: int | None,
        job_description: dict[str, Any],
        replace: Callable[[int, RemoteHost], None] = lambda host_index, host: None,
        max_ranks: int | None = None,
    ) -> None:
        """Start with all hosts of the job.

        Args:
            min_hosts: Hosts with ranks that an attempt needs; None: as many as at the start.
            job_description: What live views show of the job; kept up to date.
            replace: Called with the index and the new connection when a host has a new agent.
            max_ranks: Largest world size, with new hosts; None: no limit. Hosts beyond it wait
                until others are lost.
        """
        check_min_hosts(min_hosts, len(hosts))
        # by host index
        self._all_hosts = dict(enumerate(hosts))
        self._all_ranks_per_host = dict(enumerate(ranks_per_host))
        self._hosts_at_start, self._max_ranks = len(hosts), max_ranks or sys.maxsize
        self._remaining = list(range(len(hosts)))  # indices of the remaining hosts
        # Others wait for hosts to be lost: the job can do without them.
        self._hosts_with_ranks_at_start = len(self._ranks_of(self._remaining))
        self._min_hosts = min_hosts
        self.full_ranks = min(sum(ranks_per_host), self._max_ranks)
        self._job_description, self._on_replaced = job_description, replace
        self.attempt = 0  # number of the current attempt
        self.changed = False
        self.returned_hosts: list[RemoteHost] = []
        # returned hosts that were announced and wait for the next attempt
        self._announced: set[str] = set()
        self._changes = ""
        self._last_killed_host = ""  # host whose rank was killed first in the last attempt
        self._describe()

    @property
    def hosts(self) -> list[RemoteHost]:
        return [self._all_hosts[host_index] for host_index in self._ranks_of(self._remaining)]

    @property
    def ranks_per_host(self) -> list[int]:
        return list(self._ranks_of(self._remaining).values())

    def _ranks_of(self, host_indices: list[int]) -> dict[int, int]:
        """Return the numbers of ranks of hosts, without those that have none."""
        found, left = {}, self._max_ranks
        for host_index in host_indices:
            if count := min(self._all_ranks_per_host[host_index], left):
                found[host_index] = count
                left -= count
        return found

    @property
    def _has_room(self) -> bool:
        """Whether further ranks may be started."""
        present = [index for index in self._remaining if not self._all_hosts[index].failure]
        return sum(self._ranks_of(present).values()) < self._max_ranks

    @property
    def is_reduced(self) -> bool:
        """Whether the job has lost hosts."""
        return len(self._remaining) < len(self._all_hosts)

    def variables(self) -> dict[str, str]:
        """Return environment variables that give the full world size, to keep the global batch
        size.
        """
        return {"PACELINE_FULL_RANKS": str(self.full_ranks)} if self.is_reduced else {}

    def announce_returned(self, can_leave: bool, say: Callable[[str], None]) -> list[str]:
        """Return the names of returned hosts that the ranks can make room for now. Each host is
        announced once.

        Args:
            can_leave: Whether all ranks can write a checkpoint and stop.
        """
        if self.joining_hosts is None or not self._has_room:
            return []
        ready = self.joining_hosts.ready()
        names, arrivals = [host.name for host in ready.values()], self._arrivals(ready)
        if names and can_leave:
            has_new = any(host_index not in self._all_hosts for host_index in ready)
            size = "with more ranks" if has_new else "at full size"
            say(
                f"paceline: {arrivals}: the ranks write a checkpoint, and the job continues "
                f"{size}\n"
            )
        elif any(name not in self._announced for name in names):
            self._announced.update(names)
            takes = "it takes" if len(names) == 1 else "they take"
            say(
                f"paceline: {arrivals}; {takes} part in the next "
                "attempt, or as soon as the ranks can stop with a checkpoint (world.epochs with "
                "checkpoint=)\n"
            )
        return names if can_leave else []

    def _arrivals(self, hosts: dict[int, RemoteHost]) -> str:
        """Return a text that names hosts which are back, and those which are new."""
        texts = []
        for word, is_new in (("back", False), ("new", True)):
            of_kind = [
                host.name
                for host_index, host in hosts.items()
                if (host_index not in self._all_hosts) == is_new
            ]
            if of_kind:
                texts.append(f"{name_hosts(of_kind)} {_are(len(of_kind))} {word}")
        return ", ".join(texts)

    def readmit_returned(self) -> bool:
        """Add returned and new hosts to the remaining ones. Return whether there were any."""
        if self.joining_hosts is None or not self._has_room:
            return False
        returned = self.joining_hosts.take_ready()
        arrivals = self._arrivals(returned)
        for host_index, host in returned.items():
            self._all_hosts[host_index] = host
            self._all_ranks_per_host.setdefault(host_index, host.ranks)
            self.returned_hosts.append(host)
            self._on_replaced(host_index, host)
        if returned:
            self._remaining = sorted({*self._remaining, *returned})
            self._announced.difference_update(host.name for host in returned.values())
            self._note_change(arrivals)
        return bool(returned)

    def drop_lost(self) -> bool:
        """Exclude lost hosts. Return whether there were any.

        Raises:
            ValueError: Fewer than the required hosts remain.
        """
        lost = [host_index for host_index in self._remaining if self._all_hosts[host_index].failure]
        if not lost:
            return False
        names = name_hosts([self._all_hosts[host_index].name for host_index in lost])
        reason = f"{names} {_are(len(lost))} lost"
        left = len(self._ranks_of([index for index in self._remaining if index not in lost]))
        needed = self._hosts_with_ranks_at_start
        if self._min_hosts is not None:
            needed = min(self._min_hosts, needed)
        if left < needed:
            raise ValueError(self._too_few(reason, left))
        self._exclude(lost, reason)
        if self.joining_hosts is not None:
            for host_index in lost:
                self.joining_hosts.wait_for(host_index)
        return True

    def exclude_repeat_failure(self, cause: RankStatus | None) -> bool:
        """Take note of why an attempt failed. Return whether its host is excluded for that: its
        ranks were the first to be killed twice in a row. An exception of the script may occur on
        all hosts, and excludes none.
        """
        previous, self._last_killed_host = self._last_killed_host, ""
        if cause is None or not cause.killed:
            return False
        self._last_killed_host = cause.host
        returned = [
            host_index
            for host_index in self._remaining
            if self._all_hosts[host_index].name == cause.host
            and not self._all_hosts[host_index].failure
        ]
        enough = self._min_hosts is not None and self._min_hosts < len(self._remaining)
        if previous != cause.host or not returned or not enough:
            return False
        self._all_hosts[returned[0]].send(end=END_GRACE_S)
        self._exclude(
            returned[:1],
            f"{cause.host} is excluded: in two consecutive attempts, a rank on it was the first "
            "to be killed",
        )
        return True

    def hide_excluded(
        self, fetch_records: Callable[[int], JobSnapshot]
    ) -> Callable[[int], JobSnapshot]:
        """Return ``fetch_records`` without mention of excluded hosts."""

        def fetch_remaining(max_events: int) -> JobSnapshot:
            snapshot, names = fetch_records(max_events), [host.name for host in self.hosts]
            return dataclasses.replace(
                snapshot, silent_hosts=[name for name in snapshot.silent_hosts if name in names]
            )

        return fetch_remaining

    def take_changes(self) -> str:
        """Return a description of hosts lost or returned since the last call."""
        changes, self._changes = self._changes, ""
        if not changes:
            return ""
        nodes, ranks = len(self.hosts), sum(self.ranks_per_host)
        if len(self._all_hosts) > self._hosts_at_start:  # no size is the full one
            return (
                f"{changes}; the job continues on {counted(nodes, 'node')}, with "
                f"{counted(ranks, 'rank')},"
            )
        return (
            f"{changes}; the job continues on {nodes} of "
            f"{counted(len(self._all_hosts), 'node')}, with {ranks} of "
            f"{counted(self.full_ranks, 'rank')},"
        )

    def _exclude(self, host_indices: list[int], reason: str) -> None:
        self.changed = True
        self._remaining = [
            host_index for host_index in self._remaining if host_index not in host_indices
        ]
        self._note_change(reason)

    def _note_change(self, reason: str) -> None:
        self._describe()
        self._changes += f"; {reason}" if self._changes else reason

    def _describe(self) -> None:
        self._job_description.update(
            hosts=[host.name for host in self.hosts], on_each=self.ranks_per_host
        )

    def _too_few(self, reason: str, left: int) -> str:
        hint = "start the job again when all nodes are back; it continues from the last checkpoint"
        if not left:
            return f"{reason}, and no other node is left. HINT: {hint}"
        total = len(self._all_hosts)
        if self._min_hosts is None:
            total = self._hosts_with_ranks_at_start
        count_left = f"{left} of {counted(total, 'node')} {_are(left)} left"
        if self._min_hosts is None:
            return f"{reason}; {count_left}. HINT: --min-hosts {left} continues on these; or {hint}"
        return f"{reason}; {count_left}, fewer than --min-hosts {self._min_hosts}. HINT: {hint}"


def move_earlier_attempts(record: Path, last_attempt: int) -> None:
    """Move records of earlier attempts in a run's folder to ``attempt-N``. Records of excluded
    hosts are otherwise mixed with those of the last attempt. Never raises.
    """
    from ...analyze.records.load_run import load_record

    for path in record.glob("rank-*.ring"):
        try:
            attempt = load_record(path).meta.get("attempt", 0)
            if attempt >= last_attempt:
                continue
            attempt_folder = record / f"attempt-{attempt}"
            attempt_folder.mkdir(exist_ok=True)
            for file in (path, *map(path.with_suffix, SIDECAR_SUFFIXES)):
                if file.exists():
                    file.replace(attempt_folder / file.name)
        except (OSError, ValueError):
            continue


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
