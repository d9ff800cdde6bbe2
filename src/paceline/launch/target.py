"""Selection of the hosts for ``paceline run``: this host, named hosts, or the allocation."""

import functools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..cluster.rank_identity import launched_by
from ..cluster.schedulers import flux
from ..cluster.schedulers.allocation import Allocation
from ..cluster.schedulers.detect import find_allocation
from ..cluster.schedulers.hostfile import Host, parse_hosts, read_hostfile
from ..cluster.topology.local_resources import numa_domain_count
from ..cluster.topology.network_interfaces import is_local_host
from ..cluster.topology.visible_gpus import gpu_count
from ..plurals import counted
from ..security.processes import program_command
from .job import Job
from .layout import format_layout, ranks_per_host
from .remote.start_commands import LaunchTool, find_tool


@dataclass(frozen=True)
class Target:
    """The hosts on which the ranks are started, and how.

    Attributes:
        hosts: The hosts.
        tool: Tool that starts the agents; None if the launcher starts the ranks on this host.
        explicit: Whether the user has given the hosts' slots.
        why: Description of the source of the host list, for messages.
        chosen: Whether options or an allocation have chosen the hosts.
    """

    hosts: list[Host]
    tool: LaunchTool | None
    explicit: bool
    why: str
    chosen: bool = True


def find_target(hosts: str | None, hostfile: Path | None, launcher: str | None) -> Target:
    """Return the hosts given by the options, else those of the scheduler's allocation, else this
    host.

    Args:
        hosts: Value of ``-H``, or None.
        hostfile: Value of ``--hostfile``, or None.
        launcher: Value of ``--launcher``, or None.

    Raises:
        ValueError: The options contradict each other, the allocation is inconsistent, or another
            launcher has started several copies of ``paceline run``.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError("-H and --hostfile both name the hosts. HINT: leave out one of them")
    environment = dict(os.environ)
    _once(environment)
    if hosts is not None or hostfile is not None:
        named = parse_hosts(hosts) if hosts is not None else read_hostfile(hostfile or "")
        chosen = find_tool(launcher or "ssh")
        if not chosen.accepts_host_names:
            raise ValueError(
                f"--launcher {chosen.name} uses all nodes of its allocation, and accepts no host "
                "names. HINT: leave out -H and --hostfile, or use --launcher ssh"
            )
        return Target(named, chosen, True, "-H" if hosts else str(hostfile))
    allocation = _allocation(environment)
    here = Host("this machine", devices=gpu_count(), numa=numa_domain_count())
    if allocation is None:
        if launcher is not None:
            raise ValueError(
                f"--launcher {launcher} needs host names outside of an allocation. "
                "HINT: -H host1:4,host2:4"
            )
        return Target([here], None, False, "no allocation, and no hosts named", chosen=False)
    if allocation.note:
        _warn_once(allocation.note)
    why = f"{allocation.scheduler} job {allocation.job}"
    if allocation.ends_at is not None:
        why += f" ({max(0.0, allocation.ends_at - time.time()) / 60:.0f} min left)"
    found = list(allocation.hosts)
    if len(found) == 1 and launcher is None and is_local_host(found[0].name):
        slots = found[0].slots
        return Target([Host(found[0].name, slots, here.devices, numa=here.numa)], None, False, why)
    return Target(found, find_tool(launcher or allocation.tool), False, why)


@functools.cache
def _warn_once(note: str) -> None:
    sys.stderr.write(f"paceline: warning: {note}\n")


def _once(environment: dict[str, str]) -> None:
    """Raise ValueError if another launcher has started several copies of ``paceline run``.

    Each copy would start all ranks.
    """
    if "PACELINE_RUN" in environment:
        return  # started by a script inside a job, which is allowed
    started = launched_by(environment)
    if started is not None and started.size > 1:
        raise ValueError(
            f"{started.source} has started {started.size} copies of `paceline run`, and each would "
            "start ranks. HINT: one `paceline run SCRIPT` in the allocation starts them all; or "
            "let the launcher start the ranks: `srun python SCRIPT` with paceline.init()"
        )


def _allocation(environment: dict[str, str]) -> Allocation | None:
    found = find_allocation(environment)
    if found is None or found.hosts:
        return found
    # Flux is the only scheduler that provides the host list only by a command.
    try:
        asked = subprocess.run(
            program_command("flux", "getattr", "hostlist"),
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"Flux job {found.job}: `flux getattr hostlist`: {error}") from None
    if asked.returncode:
        raise ValueError(f"Flux job {found.job}: {asked.stderr.strip()}")
    return flux.allocation(environment, asked.stdout.strip())


def show_plan(job: Job, where: Target, ranks: int | None, variables: list[str]) -> str:
    """Return the output of ``--show``: hosts, ranks and commands that would be started.

    Args:
        job: The job.
        where: The hosts.
        ranks: World size, or None for each host's default number of ranks.
        variables: Names of the environment variables that are set on all ranks.
    """
    from .remote.start_agents import agent_command

    lines = [f"{where.why}: {_tool(where)}"]
    unknown = any(host.devices is None and host.slots is None for host in where.hosts)
    if ranks is None and unknown and where.tool is not None:
        lines.append(
            "  ranks: one per GPU of each node, or else one per NUMA domain; each node "
            "reports these at the start"
        )
        lines += [f"    {host.name}" for host in where.hosts]
    else:
        per_host = ranks_per_host(where.hosts, ranks, where.explicit)
        lines.append(
            f"  {counted(sum(per_host), 'rank')}: "
            f"{format_layout([h.name for h in where.hosts], per_host)}"
        )
    if where.tool is not None:
        names = [host.name for host in where.hosts]
        alone = where.tool.one_call_per_host
        calls = [[name] for name in names] if alone else [names]
        for call in calls[:4]:
            agent = agent_command(where.tool) + ([] if alone else ["--connect", "ADDRESS,PORT"])
            command = agent if alone and is_local_host(call[0]) else where.tool.command(call, agent)
            lines.append(f"  starts: {' '.join(command)}")
        if len(calls) > 4:
            lines.append(f"  ... and {len(calls) - 4} more")
    module = "-m " if job.module else ""
    lines.append(f"  script: {module}{' '.join([job.name, *job.args])}")
    lines.append(f"  in {os.getcwd()}, with {sys.executable}")
    if variables:
        lines.append(f"  environment variables: {', '.join(variables)}")
    return "\n".join(lines) + "\n"


def _tool(where: Target) -> str:
    count = len(where.hosts)
    if where.tool is None:
        return "ranks on this machine"
    return f"{counted(count, 'node')} over {where.tool.name}"
