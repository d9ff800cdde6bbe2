"""``paceline run`` on several hosts: an agent on each, one launcher that knows them all."""

import os
import resource
import secrets
import sys
import time
from dataclasses import asdict, replace

from ..cluster.hosts import Host
from ..comm.reach import choose, others_of
from . import keep
from .contact import Contact
from .interrupt import Interrupt
from .job import Job, check
from .layout import counts, seats, told
from .local import tell
from .server import SUBREAPER, end_children, prctl
from .there import There
from .tools import Tool

CHECK_SECONDS = 60.0
REACH_SECONDS = 30.0
BEGIN_SECONDS = 300.0  # importing torch from a file system that all hosts read at once
END_SECONDS = 60.0  # records travel
# Variables that travel to hosts whose tool does not pass the environment on.
TRAVEL = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PACELINE_TRIAL", "LANG", "TZ", "NO_COLOR")
TRAVEL_PREFIXES = (
    *("PYTHON", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "NCCL_"),
    *("GLOO_", "UCX_", "FI_", "CONDA_", "LC_", "HF_", "TF_", "JAX_", "XLA_", "PBS_"),
)


def run(
    job: Job,
    hosts: list[Host],
    tool: Tool,
    *,
    ranks: int | None,
    explicit: bool,
    environment: dict[str, str],
) -> int:
    """Run the job on ``hosts``; its exit code, as ``local.run``.

    ranks: in all, or None for each host's own number. explicit: slots are the user's words.
    environment: variables that he wants on all hosts. Raises ValueError for his mistakes, for
    hosts that can't be reached, and for hosts that can't reach each other: before any rank
    starts.
    """
    check(replace(job, ranks=1))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some for each host
    prctl(SUBREAPER, 1)
    interrupt = Interrupt()
    started = time.monotonic_ns()
    contact = Contact(tool, [host.name for host in hosts])
    try:
        found = contact.make()
        _same_versions(found)
        on_each = _counts(hosts, found, ranks, explicit)
        there = [host for host, count in zip(found, on_each, strict=True) if count]
        on_each = [count for count in on_each if count]
        if not tool.passes_environment:
            environment = {**_travelling(), **environment}
        _check(job, there, on_each, environment)
        interfaces = _reach(there)
        run_id = secrets.token_hex(6)
        _begin(job, there, interfaces, run_id)
        _say(there, on_each, interfaces, tool)
        from .watch import watch

        code = watch(job, there, seats(on_each), run_id, started, interrupt)
        _end(there)
    finally:
        contact.close()
        end_children(0.0)
    if job.record is not None:
        tell(job, job.record, code)
    return code


def _same_versions(hosts: list[There]) -> None:
    """All hosts must have what the launcher has."""
    from .on_host import versions

    ours = versions()
    for host in hosts:
        for what, version in ours.items():
            theirs = host.hello["versions"].get(what, "none")
            if theirs != version:
                raise ValueError(
                    f"{host.name} has {what} {theirs}, the launcher has {version}. HINT: the same "
                    "virtual environment on all hosts"
                )


def _counts(hosts: list[Host], found: list[There], ranks: int | None, explicit: bool) -> list[int]:
    """Ranks on each host, from what the user, the scheduler and the hosts themselves say."""
    known = [
        replace(host, name=there.name, devices=there.hello["devices"], numa=there.hello["numa"])
        for host, there in zip(hosts, found, strict=True)
    ]
    return counts(known, ranks, explicit)


def _check(job: Job, hosts: list[There], on_each: list[int], environment: dict[str, str]) -> None:
    """Each host looks whether the job can run there."""
    wanted = asdict(replace(job, summary=None, record=None))
    for host, count in zip(hosts, on_each, strict=True):
        host.send(check={**wanted, "ranks": count}, environment=environment, folder=os.getcwd())
    mistakes = []
    for host in hosts:
        try:
            host.answer("fits", CHECK_SECONDS)
        except ValueError as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        raise ValueError("\n".join(mistakes[:4]))


def _reach(hosts: list[There]) -> list[tuple[str, str]]:
    """(interface, address) of each host, by which the others reach it: tried."""
    if len(hosts) == 1:
        return [("lo", "127.0.0.1")]
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    for host in hosts:
        host.send(listen=named)
    offers = [host.answer("listening", REACH_SECONDS)["listening"] for host in hosts]
    for me, host in enumerate(hosts):
        others = others_of(me, len(hosts))
        host.send(reach={str(other): offers[other] for other in others})
    tried = {
        me: {int(k): v for k, v in host.answer("reached", REACH_SECONDS)["reached"].items()}
        for me, host in enumerate(hosts)
    }
    return choose([host.name for host in hosts], offers, tried)


def _begin(job: Job, hosts: list[There], interfaces: list[tuple[str, str]], run_id: str) -> None:
    """Import torch on all hosts, and here meanwhile."""
    record = None
    if job.record is not None:
        keep.label(job.record, [job.name, *job.args], run_id)
        record = str(job.record.absolute())
    variables = _variables(job, run_id)
    for host, (interface, address) in zip(hosts, interfaces, strict=True):
        host.address, host.record = address, job.record
        host.send(begin=variables, interface=interface, address=address, record=record)
    import torch.distributed.elastic.agent.server  # noqa: F401

    for host in hosts:
        host.answer("ready", BEGIN_SECONDS)
        host.watched = True


def _variables(job: Job, run_id: str) -> dict[str, str]:
    from .watch import variables

    return variables(job, run_id)


def _say(
    hosts: list[There], on_each: list[int], interfaces: list[tuple[str, str]], tool: Tool
) -> None:
    """One line: which rank sits where, and how they reach each other."""
    if len(hosts) > 1:
        names = [host.name for host in hosts]
        network = "/".join(sorted({interface for interface, _ in interfaces}))
        sys.stderr.write(
            f"paceline: {sum(on_each)} ranks on {len(hosts)} hosts over {tool.name}, network "
            f"{network} ({told(names, on_each)}; ranks meet at {interfaces[0][1]})\n"
        )
        sys.stderr.flush()


def _end(hosts: list[There]) -> None:
    """Have every agent end what is left, keep or send its records, and go."""
    for host in hosts:
        host.send(end=2.0)
    for host in hosts:
        try:
            host.answer("ended", END_SECONDS)
        except ValueError as trouble:
            if host.trouble():
                continue  # said already, where a rank was lost with it
            sys.stderr.write(f"paceline: {trouble}\n")


def _travelling() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in TRAVEL or name.startswith(TRAVEL_PREFIXES)
    }


def named(wanted: list[str]) -> dict[str, str]:
    """``--env NAME`` and ``--env NAME=VALUE`` as variables.

    Raises ValueError for a name without a value here.
    """
    found = {}
    for text in wanted:
        name, given, value = text.partition("=")
        if not name.isidentifier():
            raise ValueError(f"--env {text}: HINT: NAME, or NAME=VALUE")
        if not given and name not in os.environ:
            raise ValueError(f"--env {name}: it is not set here. HINT: --env {name}=VALUE")
        found[name] = value if given else os.environ[name]
    return found
