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
from .remote_host import PULSE, There

CHECK_SECONDS = 60.0
BEGIN_SECONDS = 300.0  # importing torch from a file system that all hosts read at once


@dataclass(frozen=True)
class Terms:
    """What all hosts of a job are told. environment: variables of their ranks; run: the job's
    name."""

    job: Job
    environment: dict[str, str]
    run: str


def hello() -> dict[str, Any]:
    """On a host: what the launcher compares between hosts, and lays the ranks out by."""
    return {
        "name": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "versions": versions(),
        "devices": devices(),
        "numa": numa_domains(),
    }


def versions() -> dict[str, str]:
    """What must be the same on all hosts."""
    found = {"Paceline": __version__, "Python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["PyTorch"] = importlib.metadata.version("torch")
    return found


def other_versions(host: There) -> str:
    """What a host has and the launcher has not, in words, or ""."""
    for what, version in versions().items():
        theirs = host.hello["versions"].get(what, "none")
        if theirs != version:
            return (
                f"{host.name} has {what} {theirs}, the launcher has {version}. HINT: the same "
                "virtual environment on all hosts"
            )
    return ""


def check(
    terms: Terms, hosts: list[There], on_each: list[int], granted: dict[str, int | None]
) -> dict[str, str]:
    """Each host looks whether the job can run there; why not, by the name of each where it can't.
    granted: cores of each host that the scheduler says are the job's."""
    wanted = asdict(replace(terms.job, summary=None, record=None))
    for host, count in zip(hosts, on_each, strict=True):
        told = {**wanted, "ranks": count, "granted": granted.get(host.name)}
        host.send(check=told, environment=terms.environment, folder=os.getcwd())
    mistakes = {}
    for host in hosts:
        try:
            host.answer("fits", CHECK_SECONDS)
        except ValueError as mistake:
            mistakes[host.name] = str(mistake)
    return mistakes


def begin(terms: Terms, hosts: dict[int, There], interfaces: list[tuple[str, str]]) -> None:
    """Import torch on hosts, and here meanwhile. hosts: by their place among all of the job;
    interfaces: (interface, address) of all by which they reach each other."""
    job, record = terms.job, None
    if job.record is not None:
        record = str(job.record.absolute())
    common = variables(job, terms.run)
    for place, host in hosts.items():
        interface, address = interfaces[place]
        host.address, host.record, host.run = address, job.record, terms.run
        host.send(begin=common, place=place, interface=interface, address=address, record=record)
    importlib.import_module("torch.distributed.elastic.agent.server")
    for host in hosts.values():
        host.answer("ready", BEGIN_SECONDS)
        host.watched = True
        if job.hang_timeout:
            host.every = min(PULSE, max(0.5, job.hang_timeout / 4))
        if job.report_bindings:  # how far the ranks are is asked for that often
            host.every = 0.25


def label(terms: Terms) -> None:
    """Say in the folder of the records whose they are."""
    if terms.job.record is not None:
        job_folder.label(terms.job.record, [terms.job.name, *terms.job.args], terms.run)
