"""Selection of the hosts for ``paceline run``: this host, named hosts, or the allocation."""

import functools
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from ..cluster.rank_identity import launched_by
from ..cluster.schedulers.allocation import Allocation
from ..cluster.schedulers.detect import find_allocation, flux_allocation
from ..cluster.schedulers.hostfile import Host, parse_hosts, read_hostfile
from ..cluster.topology.local_resources import numa_domain_count
from ..cluster.topology.network_interfaces import is_local_host
from ..cluster.topology.visible_gpus import gpu_count
from ..plurals import counted
from ..security.processes import run_program
from .job import Job
from .layout import format_layout, ranks_per_host
from .options import NodeOptions
from .recovery.discovery import discover_hosts
from .remote.start_commands import LaunchTool, find_tool

MAX_SHOWN_COMMANDS = 4
MAX_SHOWN_HOSTS = 4  # in a message


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


def find_target(options: NodeOptions) -> Target:
    """Return the hosts given by the options, else those of the scheduler's allocation, else this
    host.

    A host discovery script names the hosts if no other option does.

    Raises:
        ValueError: The options contradict each other, the allocation is inconsistent, or another
            launcher has started several copies of ``paceline run``.
    """
    launcher = options.launcher
    if options.hosts is not None and options.hostfile is not None:
        raise ValueError("-H and --hostfile both name the hosts. HINT: leave out one of them")
    environment = dict(os.environ)
    _once(environment)
    named, why = _named_hosts(options)
    if why:
        chosen = find_tool(launcher or "ssh")
        if not chosen.accepts_host_names:
            raise ValueError(
                f"--launcher {chosen.name} uses all nodes of its allocation, and accepts no host "
                "names. HINT: leave out -H and --hostfile, or use --launcher ssh"
            )
        return Target(named, chosen, True, why)
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
    return Target(found, _tool_of(allocation, launcher), False, why)


def _named_hosts(options: NodeOptions) -> tuple[list[Host], str]:
    """Return the hosts that an option names, and which one; "" if none does."""
    if options.hosts is not None:
        return parse_hosts(options.hosts), "-H"
    if options.hostfile is not None:
        return read_hostfile(options.hostfile), str(options.hostfile)
    if options.discovery is not None:
        return discover_hosts(options.discovery), options.discovery
    return [], ""


def _tool_of(allocation: Allocation, launcher: str | None) -> LaunchTool:
    """Return the tool that starts agents in an allocation.

    Raises:
        ValueError: It is not known or not installed. If this node is not in the allocation, its
            environment variables are probably those of another job, and the message says so.
    """
    names = ", ".join(host.name for host in allocation.hosts[:MAX_SHOWN_HOSTS])
    names += ", ..." * (len(allocation.hosts) > MAX_SHOWN_HOSTS)
    source = (
        f"the environment variables are of {allocation.scheduler} job {allocation.job} on {names}, "
        f"and this node is {socket.gethostname()}"
    )
    hint = (
        "to run on this node alone: -H localhost:2; or start the job inside an allocation that has "
        "not ended"
    )
    try:
        return replace(find_tool(launcher or allocation.tool), source=f"{source}. HINT: {hint}")
    except ValueError as error:
        if launcher is not None or any(is_local_host(host.name) for host in allocation.hosts):
            raise
        reason = str(error).partition(" HINT: ")[0]
        raise ValueError(f"{source}: {reason} HINT: {hint}") from None


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
    allocation = find_allocation(environment)
    if allocation is None or allocation.hosts:
        return allocation
    # Flux is the only scheduler that provides the host list only by a command.
    try:
        answer = run_program("flux", "getattr", "hostlist", seconds=30.0)
    except OSError as error:
        raise ValueError(f"Flux job {allocation.job}: `flux getattr hostlist`: {error}") from None
    if answer.returncode:
        raise ValueError(f"Flux job {allocation.job}: {answer.stderr.strip()}")
    return flux_allocation(environment, answer.stdout.strip())


def plan_job(job: Job, where: Target, ranks: int | None, variables: list[str]) -> dict[str, Any]:
    """Return the output of ``--dry-run --json``: hosts, ranks and commands that would be started.

    Args:
        job: The job.
        where: The hosts.
        ranks: World size, or None for each host's default number of ranks.
        variables: Names of the environment variables that are set on all ranks.
    """
    from .remote.start_agents import agent_command

    names = [host.name for host in where.hosts]
    unknown = any(host.devices is None and host.slots is None for host in where.hosts)
    per_host: list[int] | None = None  # known at the start only
    if ranks is not None or not unknown or where.tool is None:
        per_host = ranks_per_host(where.hosts, ranks, where.explicit)
    commands = []
    if where.tool is not None:
        alone = where.tool.one_call_per_host
        agent = agent_command(where.tool) + ([] if alone else ["--connect", "ADDRESS,PORT"])
        for call in [[name] for name in names] if alone else [names]:
            here = alone and is_local_host(call[0])
            commands.append(agent if here else where.tool.command(call, agent))
    return {
        "format": "paceline-plan",
        "version": 1,
        "why": where.why,
        "launcher": None if where.tool is None else where.tool.name,
        "hosts": names,
        "ranks": per_host,
        "commands": commands,
        "script": ["-m"] * job.module + [job.name, *job.args],
        "directory": os.getcwd(),
        "python": sys.executable,
        "environment_variables": variables,
    }


def render_plan(plan: dict[str, Any]) -> str:
    """Return the text of ``--dry-run``, of what ``plan_job`` returns."""
    hosts, per_host, commands = plan["hosts"], plan["ranks"], plan["commands"]
    over = f"{counted(len(hosts), 'node')} over {plan['launcher']}"
    lines = [f"{plan['why']}: {over if plan['launcher'] else 'ranks on this machine'}"]
    if per_host is None:
        lines.append(
            "  ranks: one per GPU of each node, or else one per NUMA domain; each node "
            "reports these at the start"
        )
        lines += [f"    {name}" for name in hosts]
    else:
        lines.append(f"  {counted(sum(per_host), 'rank')}: {format_layout(hosts, per_host)}")
    lines += [f"  starts: {' '.join(command)}" for command in commands[:MAX_SHOWN_COMMANDS]]
    if len(commands) > MAX_SHOWN_COMMANDS:
        lines.append(f"  ... and {len(commands) - MAX_SHOWN_COMMANDS} more")
    lines.append(f"  script: {' '.join(plan['script'])}")
    lines.append(f"  in {plan['directory']}, with {plan['python']}")
    if plan["environment_variables"]:
        lines.append(f"  environment variables: {', '.join(plan['environment_variables'])}")
    return "\n".join(lines) + "\n"
