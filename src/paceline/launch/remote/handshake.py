"""What a host and the launcher tell each other before the host gets ranks."""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import socket
from dataclasses import asdict, dataclass, replace
from typing import Any

from ... import __version__
from ...cluster.topology.local_resources import devices, numa_domains
from ..job import Job, variables
from ..records import job_folder
from .remote_host import HEARTBEAT_INTERVAL_S, RemoteHost

CHECK_TIMEOUT_S = 60.0
RANK_SERVER_TIMEOUT_S = 300.0  # importing torch from a file system that all hosts read at once


@dataclass(frozen=True)
class LaunchSpec:
    """What all hosts of a job are told. environment: variables of their ranks; run: the job's
    name."""

    job: Job
    environment: dict[str, str]
    run_id: str


def describe_host() -> dict[str, Any]:
    """On a host: what the launcher compares between hosts, and lays the ranks out by."""
    return {
        "name": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "versions": software_versions(),
        "devices": devices(),
        "numa": numa_domains(),
    }


def software_versions() -> dict[str, str]:
    """What must be the same on all hosts."""
    found = {"Paceline": __version__, "Python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["PyTorch"] = importlib.metadata.version("torch")
    return found


def version_mismatch(host: RemoteHost) -> str:
    """What a host has and the launcher has not, in words, or ""."""
    for package, version in software_versions().items():
        theirs = host.hello["versions"].get(package, "none")
        if theirs != version:
            return (
                f"{host.name} has {package} {theirs}, the launcher has {version}. HINT: the same "
                "virtual environment on all hosts"
            )
    return ""


def check_hosts(
    spec: LaunchSpec,
    hosts: list[RemoteHost],
    ranks_per_host: list[int],
    granted_cores: dict[str, int | None],
) -> dict[str, str]:
    """Each host looks whether the job can run there; why not, by the name of each where it can't.
    granted: cores of each host that the scheduler says are the job's."""
    wanted = asdict(replace(spec.job, summary=None, record=None))
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
    """Import torch on hosts, and here meanwhile. hosts: by their place among all of the job;
    interfaces: (interface, address) of all by which they reach each other."""
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
        if job.report_bindings:  # how far the ranks are is asked for that often
            host.heartbeat_interval_s = 0.25


def label_record_folder(spec: LaunchSpec) -> None:
    """Say in the folder of the records whose they are."""
    if spec.job.record is not None:
        job_folder.label(spec.job.record, [spec.job.name, *spec.job.args], spec.run_id)
