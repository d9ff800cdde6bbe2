"""Run a job on several nodes: one agent on each, controlled by this launcher."""

import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..cluster.schedulers.hostfile import Host
from ..cluster.topology.racks import rack_or_unknown, spread_over_switches
from ..comm.reachable_address import choose, others_of, requested_interface
from ..plurals import counted
from ..security.run_lock import RunLock
from . import job_folder
from .job import Job, check
from .layout import format_layout, make_seats, ranks_per_host
from .linux_processes import SUBREAPER, prctl
from .monitor.interrupt import Interrupt, TerminatedError, ignore_termination, raise_on_termination
from .monitor.live_records import LiveRecordServer
from .options import LaunchOptions
from .ranks.process_groups import end_remaining_children
from .recovery.discovery import HostDiscovery
from .recovery.rejoin import JoiningHosts
from .recovery.shrink import RemainingHosts, check_min_hosts, move_earlier_attempts
from .remote.forwarded_env import forwarded_variables
from .remote.prepare_hosts import (
    REACHABILITY_TIMEOUT_S,
    LaunchSpec,
    check_hosts,
    start_rank_servers,
    version_mismatch,
)
from .remote.remote_host import HostTimeoutError, RemoteHost
from .remote.start_agents import AgentConnections
from .remote.start_commands import LaunchTool
from .requeue import requeue
from .summary import print_summary
from .target import Target

END_TIMEOUT_S = 600.0  # records are sent, or written to a slow file system
NOTICE_INTERVAL_S = 10.0


def run(
    job: Job,
    where: Target,
    tool: LaunchTool,
    options: LaunchOptions,
    environment: dict[str, str],
) -> int:
    """Run the job and return its exit code, same as ``single_node.run``.

    Args:
        job: The job.
        where: The hosts.
        tool: Tool that starts the agents on them.
        options: How the job is started. With a host discovery script, hosts beyond the largest
            world size wait until others are lost.
        environment: Environment variables that the user sets on all hosts.

    Raises:
        ValueError: A mistake of the user, a host that can't be reached, or hosts that can't reach
            each other; before any rank starts.
    """
    hosts, discovery, excluded_hosts = where.hosts, options.nodes.discovery, options.excluded_hosts
    ranks, max_ranks = (options.ranks, None) if discovery is None else (None, options.ranks)
    check(replace(job, ranks=1))
    check_min_hosts(job.min_hosts, len(hosts))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # each host takes several descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    prctl(SUBREAPER, 1)
    interrupt = Interrupt()
    raise_on_termination(interrupt.remember_termination)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # until there are ranks to forward them to
        signal.signal(number, signal.SIG_IGN)
    started = time.monotonic_ns()
    if job.min_hosts is not None or discovery is not None:
        os.environ.setdefault("SLURM_NO_KILL", "set")  # or srun ends all agents when one host fails
    connections = AgentConnections(
        tool, [host.name for host in hosts], excluded_hosts=excluded_hosts
    )
    lock: RunLock | None = None
    try:
        if not tool.passes_environment:
            environment = {**forwarded_variables(), **environment}
        spec = LaunchSpec(job, environment, secrets.token_hex(6))
        if job.record is not None:
            lock = job_folder.lock_record(job.record, spec.run_id)
            lock.keep(lambda line: print(f"paceline: {line}", file=sys.stderr))
        count_ranks = partial(_count_ranks, where, ranks, options.min_ranks_per_host)
        remote_hosts, ranks_per_host, interfaces, cores = _prepare_hosts(
            spec, connections, count_ranks, excluded_hosts, grows=discovery is not None
        )
        from .supervise import watch

        job_description = _describe_job(job, remote_hosts, ranks_per_host)
        record_server = LiveRecordServer(spec.run_id, remote_hosts, job_description)
        remaining = RemainingHosts(
            *(remote_hosts, ranks_per_host, job.min_hosts, job_description),
            replace=record_server.replace,
            max_ranks=max_ranks,
        )
        _print_layout(remaining.hosts, remaining.ranks_per_host, interfaces, tool)
        joining = JoiningHosts(
            *(spec, tool, remote_hosts, ranks_per_host, interfaces, cores),
            peers=lambda: remaining.hosts,
        )
        if job.min_hosts is not None or discovery is not None:
            remaining.joining_hosts = joining
        host_discovery = (
            HostDiscovery(discovery, [host.name for host in hosts], joining.add)
            if discovery is not None
            else None
        )
        fetch_records, run_id = remaining.hide_excluded(record_server.snapshot), spec.run_id
        try:
            code = watch(
                job,
                remaining.hosts,
                make_seats(remaining.ranks_per_host),
                run_id,
                started,
                interrupt,
                fetch_records,
                remaining,
            )
        finally:
            if host_discovery is not None:
                host_discovery.close()
            record_server.ending = True
            # before agents write the records of the last attempt
            if job.record is not None and remaining.changed:
                move_earlier_attempts(job.record, remaining.attempt)
            _end_agents([*remote_hosts, *remaining.returned_hosts, *joining.close()])
            joining.disconnect()
            record_server.close()
    except TerminatedError as end:
        return end.report_before_start()
    finally:
        ignore_termination()
        connections.close()
        end_remaining_children()
        if lock is not None:
            lock.release()
    if job.record is not None:
        if remaining.changed:
            move_earlier_attempts(job.record, remaining.attempt)
        lost = any(host.record_error for host in remote_hosts)  # this was reported
        if not lost or any(job.record.glob("*.ring")):
            print_summary(job.record, code, job.summary, job.guard)
    if interrupt.stopped_early:
        requeue()
    return code


# Returns the number of ranks of each connected host, and by host name the cores that the scheduler
# grants there.
CountRanks = Callable[[list[RemoteHost]], tuple[list[int], dict[str, int | None]]]


def _count_ranks(
    where: Target, ranks: int | None, min_ranks_per_host: int, found: list[RemoteHost]
) -> tuple[list[int], dict[str, int | None]]:
    """See ``CountRanks``. The other arguments are those of ``run``."""
    by_name = {host.name: host for host in where.hosts}
    if len(found) == len(where.hosts):  # the tool may use other names
        hosts = where.hosts
    else:
        hosts = [by_name.get(host.name, Host(host.name)) for host in found]
    known = [
        replace(host, name=remote.name, devices=remote.hello["devices"], numa=remote.hello["numa"])
        for host, remote in zip(hosts, found, strict=True)
    ]
    counts = ranks_per_host(known, ranks, where.explicit)
    if ranks is None and any(host.slots is None for host in hosts):
        counts = [max(min_ranks_per_host, count) for count in counts]
    return counts, {host.name: host.cpus for host in known}


def _prepare_hosts(
    spec: LaunchSpec,
    connections: AgentConnections,
    count_ranks: CountRanks,
    excluded_hosts: dict[str, str] | None,
    grows: bool,
) -> tuple[list[RemoteHost], list[int], list[tuple[str, str]], dict[str, int | None]]:
    """Make the hosts ready to start ranks. Return those that get ranks, the ranks per host, each
    host's (interface, address), and its cores by name. grows: whether hosts may be added later.
    """
    found = connections.start()
    found = _exclude_hosts(
        found, {host.name: version_mismatch(host) for host in found}, excluded_hosts
    )
    ranks_per_host, cores = count_ranks(found)
    mistakes = check_hosts(spec, *_hosts_with_ranks(found, ranks_per_host), cores)
    if mistakes:
        found = _exclude_hosts(found, mistakes, excluded_hosts)
        # The numbers of ranks may be different: check once more.
        ranks_per_host, cores = count_ranks(found)
        _exclude_hosts(
            found, check_hosts(spec, *_hosts_with_ranks(found, ranks_per_host), cores), None
        )
    remote_hosts, ranks_per_host = _hosts_with_ranks(found, ranks_per_host)
    interfaces = _choose_addresses(remote_hosts, grows)
    if spec.job.record is not None:
        job_folder.write_label(spec.job.record, spec.job.words, spec.run_id, spec.job.env)
    start_rank_servers(spec, dict(enumerate(remote_hosts)), interfaces)
    return remote_hosts, ranks_per_host, interfaces, cores


def _hosts_with_ranks(
    hosts: list[RemoteHost], ranks_per_host: list[int]
) -> tuple[list[RemoteHost], list[int]]:
    """Return the hosts that get ranks, and the number of ranks of each."""
    used = [host for host, count in zip(hosts, ranks_per_host, strict=True) if count]
    return used, [count for count in ranks_per_host if count]


def _exclude_hosts(
    hosts: list[RemoteHost], mistakes: dict[str, str], excluded_hosts: dict[str, str] | None
) -> list[RemoteHost]:
    """Return the hosts without those that can't take part.

    Raises:
        ValueError: All hosts are needed, or none is left.
    """
    reasons = {name: why for name, why in mistakes.items() if why}
    left = [host for host in hosts if host.name not in reasons]
    if reasons and (excluded_hosts is None or not left):
        raise ValueError("\n".join(list(reasons.values())[:4]))
    if excluded_hosts is not None:
        excluded_hosts.update(reasons)
    return left


def _choose_addresses(hosts: list[RemoteHost], grows: bool) -> list[tuple[str, str]]:
    """Return each host's (interface, address) by which the others can connect to it, as tested."""
    if len(hosts) == 1 and not grows:
        return [("lo", "127.0.0.1")]
    for host in hosts:
        host.send(listen=requested_interface())
    offers = [
        host.wait_for_answer("listening", REACHABILITY_TIMEOUT_S)["listening"] for host in hosts
    ]
    for me, host in enumerate(hosts):
        others = others_of(me, len(hosts))
        host.send(reach={str(other): offers[other] for other in others})
    tried = {
        me: {
            int(k): v
            for k, v in host.wait_for_answer("reached", REACHABILITY_TIMEOUT_S)["reached"].items()
        }
        for me, host in enumerate(hosts)
    }
    return choose([host.name for host in hosts], offers, tried)


def _describe_job(job: Job, hosts: list[RemoteHost], ranks_per_host: list[int]) -> dict[str, Any]:
    """Return the description of the job for live views."""
    record = str(job.record.absolute()) if job.record is not None else None
    names = [host.name for host in hosts]
    return {"command": job.words, "record": record, "hosts": names, "on_each": ranks_per_host}


def _print_layout(
    hosts: list[RemoteHost],
    ranks_per_host: list[int],
    interfaces: list[tuple[str, str]],
    tool: LaunchTool,
) -> None:
    """Print the ranks of each host, the network and the store's address."""
    if len(hosts) > 1:
        names = [host.name for host in hosts]
        network = "/".join(sorted({interface for interface, _ in interfaces}))
        sys.stderr.write(
            f"paceline: {counted(sum(ranks_per_host), 'rank')} on {counted(len(hosts), 'node')} "
            f"over {tool.name}, network {network} ({format_layout(names, ranks_per_host)}; "
            f"ranks meet at {interfaces[0][1]})\n"
        )
        # Agents that ssh has started do not have this process's PACELINE_RACKS.
        racks = {
            host.name: rack_or_unknown(host.name) or host.hello.get("rack", "") for host in hosts
        }
        if spread := spread_over_switches(racks):
            sys.stderr.write(f"paceline: {spread}\n")
        sys.stderr.flush()


def _end_agents(hosts: list[RemoteHost]) -> None:
    """Have every agent end its processes, keep or send the records, and exit."""
    for host in hosts:
        host.send(end=2.0)
    for host in hosts:
        if host.failure:
            host.wait_until_closed(NOTICE_INTERVAL_S)
        waited = 0.0
        while not host.failure and waited < END_TIMEOUT_S:
            try:
                host.wait_for_answer("ended", NOTICE_INTERVAL_S)
                break
            except HostTimeoutError:
                waited += NOTICE_INTERVAL_S
                sys.stderr.write(f"paceline: waiting for {host.name} to end ...\n")
            except ValueError as mistake:
                if not host.failure:  # a lost host was reported with its ranks
                    sys.stderr.write(f"paceline: {mistake}\n")
