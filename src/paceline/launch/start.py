"""What ``paceline run`` does with its options: where, how many, and off."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from . import single_node
from .job import Job, check
from .layout import counts
from .remote.forwarded_env import parse_env_options
from .target import shown, target


def start(
    job: Job,
    ranks: int | None,
    hosts: str | None,
    hostfile: Path | None,
    launcher: str | None,
    variables: list[str],
    show_only: bool = False,
    min_ranks_per_host: int = 1,
    excluded_hosts: dict[str, str] | None = None,
) -> int:
    """Run the job where the options and the allocation say; the exit code. least, without: as
    ``several.run`` has them.

    Raises ValueError for the user's mistakes.
    """
    environment = parse_env_options(variables)
    where = target(hosts, hostfile, launcher)
    if show_only:
        check(replace(job, ranks=1, record=None))
        sys.stdout.write(shown(job, where, ranks, sorted(environment)))
        return 0
    if where.tool is None:
        os.environ.update(environment)
        (count,) = counts(where.hosts, ranks, where.explicit)
        count = count if ranks is not None else max(min_ranks_per_host, count)
        return single_node.run(replace(job, ranks=count, granted=where.hosts[0].cpus))
    from . import multi_node  # not needed, and not waited for, on one machine

    return multi_node.run(
        job,
        where.hosts,
        where.tool,
        ranks=ranks,
        explicit=where.explicit,
        environment=environment,
        min_ranks_per_host=min_ranks_per_host,
        excluded_hosts=excluded_hosts,
    )
