"""``paceline stage`` on all hosts of an allocation: a job with one rank per host."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..cluster.rank_identity import launched_by
from ..cluster.topology.network_interfaces import is_local_host
from ..launch.job import Job
from ..launch.options import LaunchOptions, NodeOptions
from ..launch.target import Target, find_target
from ..plurals import counted
from .measuring_jobs import run_and_read_summary

RANK = "paceline.study.stage_rank"


def staging_target(nodes: NodeOptions) -> Target | None:
    """Return the hosts to stage on.

    None if the only one is this host, or if a launcher has started this process as one of several,
    each of which stages on its own host.

    Raises:
        ValueError: Options contradict each other.
    """
    if nodes.hosts is None and nodes.hostfile is None:
        started = launched_by(dict(os.environ))
        if "PACELINE_RUN" in os.environ or (started is not None and started.size > 1):
            return None
    found = find_target(nodes)
    alone = len(found.hosts) == 1 and (not found.explicit or is_local_host(found.hosts[0].name))
    return None if alone else found


def stage_on_hosts(
    nodes: NodeOptions,
    where: Target,
    source: Path,
    root: str,
    room: int | None,
    say: Callable[[str], None],
    shared: bool = False,
) -> tuple[int, list[dict[str, Any]]]:
    """Stage on several hosts; return the exit code and what each host did.

    Args:
        where: The hosts, from ``staging_target``.
        room: Maximum number of bytes to use on each host.

    Raises:
        ValueError: An option is invalid, or the job ended without a summary.
    """
    count = len(where.hosts)
    # The slots of a host count training ranks; staging needs one rank per host.
    named = (
        ",".join(f"{_bracketed(host.name)}:1" for host in where.hosts) if where.explicit else None
    )
    ranks = LaunchOptions(count, NodeOptions(named, launcher=nodes.launcher, env=nodes.env))
    words = [str(source.resolve()), root, *(["--room", str(room)] if room is not None else [])]
    words += ["--shared"] if shared else []
    say(f"{source} to {root} of {counted(count, 'host')}")
    code, found = run_and_read_summary(
        Job(RANK, words, True, bind="none", hang_timeout=0.0),
        ranks,
        "staging ended with exit code {code}. Complete shards are kept. HINT: see the messages of "
        "the hosts above, then repeat the same command, which continues",
    )
    hosts: list[dict[str, Any]] = found["hosts"]
    return max(code, int(any(host["error"] for host in hosts))), hosts


def _bracketed(name: str) -> str:
    """Return a host name or address for -H; IPv6 addresses are put in brackets."""
    return f"[{name}]" if ":" in name else name


def sum_hosts(hosts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the value of --json: the result of each host, and the sums over all hosts."""
    each = ("copied", "fetched", "bytes", "read")
    return {name: sum(host[name] for host in hosts) for name in each} | {"hosts": hosts}
