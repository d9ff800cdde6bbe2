"""Going on without a host: which are left, whether they are enough, and what is said of it.

A host that is lost, or whose ranks were the first to be killed in two attempts in a row, is not
part of the next attempt, as long as ``--min-hosts`` are left.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..report.numbers import counted
from .deaths import Watched
from .live import Seen
from .there import There

END_SECONDS = 2.0  # for what still runs on a host that is left out


def check(least: int | None, hosts: int) -> None:
    """Raises ValueError where --min-hosts asks for more hosts than the job has."""
    if least is not None and least > hosts:
        raise ValueError(
            f"--min-hosts {least}: the job has {counted(hosts, 'host')}. "
            f"HINT: --min-hosts {hosts}{' or fewer' if hosts > 1 else ''}"
        )


class Remaining:
    """The hosts that are left of a job, and how many ranks each has."""

    def __init__(
        self, hosts: list[There], on_each: list[int], least: int | None, about: dict[str, Any]
    ) -> None:
        """least: hosts that an attempt needs; None: all. about: what live views are told of
        the job, kept right."""
        check(least, len(hosts))
        self.hosts, self.on_each = list(hosts), list(on_each)
        self._least = least
        self._all, self.full_ranks = len(hosts), sum(on_each)
        self._about = about
        self.attempt = 0  # that runs now
        self._news = ""
        self._blamed = ""  # the host whose rank was killed first in the last attempt

    @property
    def fewer(self) -> bool:
        """Whether there were more."""
        return len(self.hosts) < self._all

    def variables(self) -> dict[str, str]:
        """What ranks are told: how many there would be, for the global batch to stay the same."""
        return {"PACELINE_FULL_RANKS": str(self.full_ranks)} if self.fewer else {}

    def drop_lost(self) -> bool:
        """Leave the lost hosts out; whether there are any. Raises ValueError where too few are
        left."""
        lost = [host for host in self.hosts if host.trouble]
        if not lost:
            return False
        told = f"{_names(lost)} {_are(len(lost))} lost"
        left = len(self.hosts) - len(lost)
        needed = self._all if self._least is None else self._least
        if left < needed:
            raise ValueError(self._too_few(told, left))
        self._leave_out(lost, told)
        return True

    def blame(self, cause: Watched | None) -> bool:
        """Take in why an attempt has failed; whether its host is left out for that: its ranks
        were the first to be killed twice in a row. What a script raises, all hosts may have."""
        before, self._blamed = self._blamed, ""
        if cause is None or not cause.killed:
            return False
        self._blamed = cause.host
        found = [host for host in self.hosts if host.name == cause.host and not host.trouble]
        enough = self._least is not None and self._least < len(self.hosts)
        if before != cause.host or not found or not enough:
            return False
        found[0].send(end=END_SECONDS)
        self._leave_out(
            found,
            f"{cause.host} is left out: in two attempts in a row a rank on it was the first to "
            "be killed",
        )
        return True

    def only(self, look: Callable[[int], Seen]) -> Callable[[int], Seen]:
        """What ``look`` sees, without a word of hosts that are left out."""

        def looked(most: int) -> Seen:
            seen, names = look(most), [host.name for host in self.hosts]
            return replace(seen, silent=[name for name in seen.silent if name in names])

        return looked

    def news(self) -> str:
        """What is to be said of the hosts that were left out since the last call."""
        news, self._news = self._news, ""
        if not news:
            return ""
        return (
            f"{news}; going on with {len(self.hosts)} of {self._all} hosts, "
            f"{sum(self.on_each)} of {self.full_ranks} ranks,"
        )

    def _leave_out(self, hosts: list[There], told: str) -> None:
        kept = [
            (host, count)
            for host, count in zip(self.hosts, self.on_each, strict=True)
            if host not in hosts
        ]
        self.hosts, self.on_each = [host for host, _ in kept], [count for _, count in kept]
        self._about.update(hosts=[host.name for host in self.hosts], on_each=self.on_each)
        self._news += f"; {told}" if self._news else told

    def _too_few(self, told: str, left: int) -> str:
        again = "start it again when all are back, and it goes on from the last checkpoint"
        if not left:
            return f"{told}, and no other is left. HINT: {again}"
        some = f"{left} of {counted(self._all, 'host')} {_are(left)} left"
        if self._least is None:
            return f"{told}; {some}. HINT: --min-hosts {left} goes on with those, or {again}"
        return f"{told}; {some}, fewer than --min-hosts {self._least}. HINT: {again}"


def sort_out(record: Path, last: int) -> None:
    """In the folder of a run's records: those of hosts that were left out lie where the last
    attempt's belong; they go to the earlier attempts'. Never raises."""
    from ..analyze.read import read

    for path in record.glob("rank-*.ring"):
        try:
            attempt = int(read(path.read_bytes(), str(path)).meta.get("attempt", 0))
            if attempt >= last:
                continue
            place = record / f"attempt-{attempt}"
            place.mkdir(exist_ok=True)
            for file in (path, path.with_suffix(".lines")):
                if file.exists():
                    file.replace(place / file.name)
        except (OSError, ValueError):
            continue


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _names(hosts: list[There]) -> str:
    names = [host.name for host in hosts]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
