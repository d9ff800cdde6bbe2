"""Start of a job from the options of ``paceline run``: select the hosts and ranks, and run."""

import json
import os
import sys
from dataclasses import replace

from ..analyze.rehearsal.facts import HostFacts, RehearsalRequest
from ..cluster.schedulers.hostfile import Host
from ..cluster.topology.local_resources import allowed_threads
from ..cluster.topology.topology import topology
from ..plurals import format_ranges
from ..security.outputs import write_output
from . import single_node
from .job import Job, check
from .layout import explain_default_ranks, ranks_per_host
from .options import LaunchOptions, Preview
from .remote.forwarded_env import parse_env_options
from .script_source import names_gpus, uses_horovod
from .target import Target, find_target, plan_job, render_plan

MAX_REHEARSED_RANKS = 16_384  # process groups of more ranks take minutes to create


def start(job: Job, options: LaunchOptions) -> int:
    """Run the job on the hosts given by the options or the allocation, and return its exit code.

    Raises:
        ValueError: The options are invalid, or the job can't run.
    """
    ranks, nodes, preview = options.ranks, options.nodes, options.preview
    environment = parse_env_options(nodes.env or [])
    message = ""
    if options.guard is not None and preview in (None, Preview.PLAN):
        from .guard.loss_guard import LossGuard

        guard = LossGuard(options.guard, ranks or 1, job.words)
        job, message = replace(job, guard=guard), guard.start_text
    where = find_target(nodes)
    if nodes.discovery is not None and not job.max_restarts:
        raise ValueError(
            "--host-discovery-script needs a job that may restart: all ranks start again when "
            "there is a new host. HINT: --max-restarts 10"
        )
    if preview is not None:
        shown_ranks = ranks if nodes.discovery is None else _at_most(ranks, where.hosts)
        return _show(preview, job, where, shown_ranks, environment)
    if where.tool is None:
        os.environ.update(environment)
        (count,) = ranks_per_host(where.hosts, ranks, where.explicit)
        count = count if ranks is not None else max(options.min_ranks_per_host, count)
        if options.explain_default and ranks is None and not where.chosen:
            cores = len(topology().cores(set(allowed_threads())))
            message += explain_default_ranks(where.hosts[0], cores)
        here = replace(job, ranks=count, granted=where.hosts[0].cpus)
        return single_node.run(here, message)
    sys.stderr.write(message)
    from . import multi_node  # imported late: a job on one node does not need it

    return multi_node.run(job, where, where.tool, options, environment)


def _show(
    preview: Preview, job: Job, where: Target, ranks: int | None, environment: dict[str, str]
) -> int:
    """Show what the job would do, and return the exit code."""
    if preview is Preview.PLAN:
        return _show_plan(job, where, ranks, sorted(environment))
    os.environ.update(environment)
    if preview is not Preview.MEMORY:
        return single_node.run(_rehearsing(job, where, ranks, preview is Preview.LAYOUT))
    # one rank on this node predicts what each of them would need
    each = ranks_per_host(where.hosts, ranks, where.explicit)
    alone = replace(job, ranks=1, max_restarts=0, min_hosts=None)
    return single_node.run(replace(alone, show_memory=(sum(each), max(each))))


def _show_plan(job: Job, where: Target, ranks: int | None, variables: list[str]) -> int:
    """Print which ranks would start where, or write it to the file of --json."""
    check(replace(job, ranks=1, record=None))
    plan = plan_job(job, where, ranks, variables)
    if job.summary is None:
        sys.stdout.write(render_plan(plan))
        return 0
    try:
        write_output(job.summary, json.dumps(plan, indent=1) + "\n")
    except OSError as error:
        raise ValueError(
            f"--json {job.summary}: {error.strerror}. HINT: choose another file"
        ) from None
    return 0


def _rehearsing(job: Job, where: Target, ranks: int | None, shows_layout: bool) -> Job:
    """Return the job of one rank on this node that rehearses those of all hosts.

    Raises:
        ValueError: The script uses Horovod, or there are too many ranks.
    """
    if uses_horovod(job):
        raise ValueError(
            "--rehearse can't run scripts that use Horovod: its ranks agree about each tensor. "
            "HINT: paceline run -n 2 tries the script on two ranks"
        )
    each = ranks_per_host(where.hosts, ranks, where.explicit)
    if sum(each) > MAX_REHEARSED_RANKS:
        raise ValueError(
            f"--rehearse {sum(each)}: at most {MAX_REHEARSED_RANKS:,} ranks can be rehearsed. "
            f"HINT: --rehearse {MAX_REHEARSED_RANKS}"
        )
    hosts = [
        HostFacts(host.name, count, _places(job, count) if where.tool is None else [])
        for host, count in zip(where.hosts, each, strict=True)
        if count
    ]
    alone = replace(job, ranks=1, max_restarts=0, min_hosts=None, hang_timeout=0.0)
    alone = replace(alone, tuning=None, report_bindings=False)
    return replace(alone, rehearsal=RehearsalRequest(hosts, shows_layout, names_gpus(job)))


def _places(job: Job, ranks: int) -> list[str]:
    """Return where on this host its ranks would run; "" for one that is not bound."""
    from .affinity.bind_ranks import plan_bindings

    found = []
    for place in plan_bindings(replace(job, ranks=ranks)):
        parts = [f"socket {format_ranges(list(place.packages))}"] if place.packages else []
        parts += [f"GPU {place.device}"] if place.device is not None else []
        parts += [f"near {', '.join(place.cards)}"] if place.cards else []
        found.append(", ".join(parts))
    return found


def _at_most(ranks: int | None, hosts: list[Host]) -> int | None:
    """Return the world size of hosts that have at most ``ranks`` ranks; None: not known yet."""
    slots = [host.slots for host in hosts if host.slots is not None]
    return min(ranks, sum(slots)) if ranks is not None and len(slots) == len(hosts) else None
