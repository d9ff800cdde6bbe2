"""Exchange what the launcher and a host must know before the host gets ranks."""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import socket
from dataclasses import asdict, dataclass, replace
from typing import Any

from ... import __version__
from ...cluster.topology.local_resources import numa_domain_count
from ...cluster.topology.network_interfaces import network_links
from ...cluster.topology.racks import rack_or_unknown
from ...cluster.topology.visible_gpus import gpu_count
from ..job import Job, variables
from .remote_host import HEARTBEAT_INTERVAL_S, RemoteHost

CHECK_TIMEOUT_S = 60.0
REACHABILITY_TIMEOUT_S = 30.0  # for hosts to try the addresses of each other
RANK_SERVER_TIMEOUT_S = 300.0  # all hosts import torch from a shared file system at once


@dataclass(frozen=True)
class LaunchSpec:
    """What all hosts of a job are told.

    Attributes:
        job: The job.
        environment: Environment variables of all ranks.
        run_id: Identifier of the job.
    """

    job: Job
    environment: dict[str, str]
    run_id: str


def describe_host() -> dict[str, Any]:
    """Describe this host for the launcher, which compares versions and lays out the ranks by it."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return {
        "name": name,
        "versions": software_versions(),
        "devices": gpu_count(),
        "numa": numa_domain_count(),
        "rack": rack_or_unknown(name),
        "addresses": [link.address for link in network_links()],
    }


def software_versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts."""
    found = {"Paceline": __version__, "Python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["PyTorch"] = importlib.metadata.version("torch")
    return found


def version_mismatch(host: RemoteHost) -> str:
    """Return a message if a host's versions differ from the launcher's, or ""."""
    for package, version in software_versions().items():
        theirs = host.hello["versions"].get(package, "none")
        if theirs != version:
            return (
                f"{host.name} has {package} {theirs}, the launcher has {version}. HINT: use the "
                "same virtual environment on all nodes"
            )
    return ""


def check_hosts(
    spec: LaunchSpec,
    hosts: list[RemoteHost],
    ranks_per_host: list[int],
    granted_cores: dict[str, int | None],
) -> dict[str, str]:
    """Have each host check that the job can run there.

    Args:
        granted_cores: Cores that the scheduler grants the job, by host name.

    Returns:
        By host name, why the job can't run there.
    """
    wanted = asdict(replace(spec.job, summary=None, record=None, guard=None))
    for host, count in zip(hosts, ranks_per_host, strict=True):
        check_message = {**wanted, "ranks": count, "granted": granted_cores.get(host.name)}
        host.send(check=check_message, environment=spec.environment, folder=os.getcwd())
    mistakes = {}
    for host in hosts:
        try:
            host.wait_for_answer("fits", CHECK_TIMEOUT_S)
        except ValueError as mistake:
            mistakes[host.name] = str(mistake)
    return mistakes


def start_rank_servers(
    spec: LaunchSpec, hosts: dict[int, RemoteHost], interfaces: list[tuple[str, str]]
) -> None:
    """Import torch on the hosts, and in this process meanwhile.

    Args:
        hosts: By index among the job's hosts.
        interfaces: (interface, address) of all hosts, by which they reach each other.
    """
    job, record = spec.job, None
    if job.record is not None:
        record = str(job.record.absolute())
    rank_variables = variables(job, spec.run_id)
    for host_index, host in hosts.items():
        interface, address = interfaces[host_index]
        host.address, host.record_folder, host.run_id = address, job.record, spec.run_id
        host.send(
            begin=rank_variables,
            place=host_index,
            interface=interface,
            address=address,
            record=record,
        )
    importlib.import_module("torch.distributed.elastic.agent.server")
    for host in hosts.values():
        host.wait_for_answer("ready", RANK_SERVER_TIMEOUT_S)
        host.expects_heartbeats = True
        if job.hang_timeout:
            host.heartbeat_interval_s = min(HEARTBEAT_INTERVAL_S, max(0.5, job.hang_timeout / 4))
        if job.report_bindings:  # the report waits for the first step of the ranks
            host.heartbeat_interval_s = 0.25
