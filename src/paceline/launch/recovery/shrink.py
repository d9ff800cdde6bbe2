"""Going on without a host: which are left, whether they are enough, and what is said of it.

A host that is lost, or whose ranks were the first to be killed in two attempts in a row, is not
part of the next attempt, as long as ``--min-hosts`` are left. One that was lost and comes back
(``returning``) is part of the next again.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...report.numbers import counted
from ..monitor.failures import Watched
from ..monitor.live_records import Seen
from ..remote.remote_host import There
from .rejoin import Returning

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

    returning: Returning | None = None  # to be set: who looks for hosts that are lost

    def __init__(
        self,
        hosts: list[There],
        on_each: list[int],
        least: int | None,
        about: dict[str, Any],
        replace: Callable[[int, There], None] = lambda place, host: None,
    ) -> None:
        """least: hosts that an attempt needs; None: all. about: what live views are told of
        the job, kept right. replace: is told of another agent on a host, by its place."""
        check(least, len(hosts))
        self._every, self._on_every = list(hosts), list(on_each)  # by place
        self._left = list(range(len(hosts)))  # the places of those that are left
        self._least = least
        self.full_ranks = sum(on_each)
        self._about, self._replace = about, replace
        self.attempt = 0  # that runs now
        self.changed = False  # whether a host was ever left out
        self.came_back: list[There] = []
        self._told: set[str] = set()  # hosts that are back and wait for the next attempt
        self._news = ""
        self._blamed = ""  # the host whose rank was killed first in the last attempt

    @property
    def hosts(self) -> list[There]:
        return [self._every[place] for place in self._left]

    @property
    def on_each(self) -> list[int]:
        return [self._on_every[place] for place in self._left]

    @property
    def fewer(self) -> bool:
        """Whether there were more."""
        return len(self._left) < len(self._every)

    def variables(self) -> dict[str, str]:
        """What ranks are told: how many there would be, for the global batch to stay the same."""
        return {"PACELINE_FULL_RANKS": str(self.full_ranks)} if self.fewer else {}

    def back(self, can_leave: bool, say: Callable[[str], None]) -> list[str]:
        """Names of hosts that were lost and could have ranks again, where the ranks can leave for
        them. What becomes of these hosts is said once."""
        ready = self.returning.ready() if self.returning is not None else []
        names = [self._every[place].name for place in ready]
        if names and can_leave:
            say(
                f"paceline: {_names(names)} {_are(len(names))} back: the ranks write a checkpoint, "
                "and the job goes on at its full size\n"
            )
        elif any(name not in self._told for name in names):
            self._told.update(names)
            say(
                f"paceline: {_names(names)} {_are(len(names))} back; it takes part in the next "
                "attempt, or once the ranks can leave (world.epochs with checkpoint=)\n"
            )
        return names if can_leave else []

    def take_back(self) -> bool:
        """Those are left as well from now on; whether there are any."""
        found = self.returning.take() if self.returning is not None else {}
        for place, host in found.items():
            self._every[place] = host
            self.came_back.append(host)
            self._replace(place, host)
        if found:
            self._left = sorted({*self._left, *found})
            names = _names([host.name for host in found.values()])
            self._told.difference_update(host.name for host in found.values())
            self._now(f"{names} {_are(len(found))} back")
        return bool(found)

    def drop_lost(self) -> bool:
        """Leave the lost hosts out; whether there are any. Raises ValueError where too few are
        left."""
        lost = [place for place in self._left if self._every[place].trouble]
        if not lost:
            return False
        told = f"{_names([self._every[place].name for place in lost])} {_are(len(lost))} lost"
        left = len(self._left) - len(lost)
        needed = len(self._every) if self._least is None else self._least
        if left < needed:
            raise ValueError(self._too_few(told, left))
        self._leave_out(lost, told)
        if self.returning is not None:
            for place in lost:
                self.returning.wait_for(place)
        return True

    def blame(self, cause: Watched | None) -> bool:
        """Take in why an attempt has failed; whether its host is left out for that: its ranks
        were the first to be killed twice in a row. What a script raises, all hosts may have."""
        before, self._blamed = self._blamed, ""
        if cause is None or not cause.killed:
            return False
        self._blamed = cause.host
        found = [
            place
            for place in self._left
            if self._every[place].name == cause.host and not self._every[place].trouble
        ]
        enough = self._least is not None and self._least < len(self._left)
        if before != cause.host or not found or not enough:
            return False
        self._every[found[0]].send(end=END_SECONDS)
        self._leave_out(
            found[:1],
            f"{cause.host} is left out: in two attempts in a row a rank on it was the first to "
            "be killed",
        )
        return True

    def only(self, look: Callable[[int], Seen]) -> Callable[[int], Seen]:
        """What ``look`` sees, without a word of hosts that are left out."""

        def looked(most: int) -> Seen:
            seen, names = look(most), [host.name for host in self.hosts]
            return dataclasses.replace(seen, silent=[name for name in seen.silent if name in names])

        return looked

    def news(self) -> str:
        """What is to be said of the hosts that have gone or come since the last call."""
        news, self._news = self._news, ""
        if not news:
            return ""
        return (
            f"{news}; going on with {len(self._left)} of {len(self._every)} hosts, "
            f"{sum(self.on_each)} of {self.full_ranks} ranks,"
        )

    def _leave_out(self, places: list[int], told: str) -> None:
        self.changed = True
        self._left = [place for place in self._left if place not in places]
        self._now(told)

    def _now(self, told: str) -> None:
        self._about.update(hosts=[host.name for host in self.hosts], on_each=self.on_each)
        self._news += f"; {told}" if self._news else told

    def _too_few(self, told: str, left: int) -> str:
        again = "start it again when all are back, and it goes on from the last checkpoint"
        if not left:
            return f"{told}, and no other is left. HINT: {again}"
        some = f"{left} of {counted(len(self._every), 'host')} {_are(left)} left"
        if self._least is None:
            return f"{told}; {some}. HINT: --min-hosts {left} goes on with those, or {again}"
        return f"{told}; {some}, fewer than --min-hosts {self._least}. HINT: {again}"


def sort_out(record: Path, last: int) -> None:
    """In the folder of a run's records: those of hosts that were left out lie where the last
    attempt's belong; they go to the earlier attempts'. Never raises."""
    from ...analyze.records.load_run import load_record

    for path in record.glob("rank-*.ring"):
        try:
            attempt = load_record(path).meta.get("attempt", 0)
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


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
