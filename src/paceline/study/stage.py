"""``paceline stage`` on all hosts of an allocation: a job of one rank a host."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cluster.who import launched_by
from ..launch.job import Job
from ..launch.start import start
from ..launch.target import target
from .summary import summary_of

RANK = "paceline.study.stage_rank"


@dataclass(frozen=True)
class Wish:
    """Where, as the options say."""

    hosts: str | None = None
    hostfile: Path | None = None
    launcher: str | None = None
    variables: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many hosts; 1 where this process is one of several that a launcher has started, each
        for its own host. Raises ValueError for options that contradict each other."""
        if self.hosts is None and self.hostfile is None:
            started = launched_by(dict(os.environ))
            if "PACELINE_RUN" in os.environ or (started is not None and started.size > 1):
                return 1
        return len(target(self.hosts, self.hostfile, self.launcher).hosts)


def over_hosts(
    wish: Wish, source: Path, root: str, room: int | None, say: Callable[[str], None]
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and what each host did, by name.

    Raises ValueError for mistakes, and where hosts ended before they could tell.
    """
    count = wish.count
    words = [str(source.resolve()), root, *(["--room", str(room)] if room is not None else [])]
    say(f"{source} to {root} of {count} hosts")
    code, found = summary_of(
        Job(RANK, words, True, bind="none", hang_timeout=0.0),
        lambda job: start(
            job, count, wish.hosts, wish.hostfile, wish.launcher, list(wish.variables)
        ),
    )
    if found is None:
        raise ValueError(
            f"staging ended with exit code {code}: what is whole on a host is kept. HINT: what "
            "they said is above; the same command goes on"
        )
    told: list[dict[str, Any]] = found["hosts"]
    return max(code, int(any(one["error"] for one in told))), told


def summed(hosts: list[dict[str, Any]]) -> str:
    """For --json: the hosts and what they did together."""
    each = ("copied", "fetched", "bytes", "read")
    return json.dumps({name: sum(one[name] for one in hosts) for name in each} | {"hosts": hosts})
