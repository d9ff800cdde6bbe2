"""``paceline run`` on several hosts: an agent on each, one launcher that knows them all."""

import os
import resource
import secrets
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from ..cluster.schedulers.hostfile import Host
from ..comm.reachable_address import asked, choose, others_of
from .job import Job, check
from .layout import counts, seats, told
from .linux_prctl import SUBREAPER, prctl
from .monitor.interrupt import Interrupt, TerminatedError, no_longer_end, raise_on_end
from .monitor.live_records import Live
from .ranks.fork_server import end_children
from .recovery.rejoin import Returning
from .recovery.shrink import Remaining, sort_out
from .recovery.shrink import check as enough
from .remote.forwarded_env import travelling
from .remote.handshake import Terms, begin, label, other_versions
from .remote.handshake import check as check_there
from .remote.remote_host import SilentError, There
from .remote.start_agents import Contact
from .remote.start_commands import Tool
from .requeue import put_back
from .single_node import tell

REACH_SECONDS = 30.0
END_SECONDS = 600.0  # records travel, or go to a slow file system
SAY_SECONDS = 10.0


def run(
    job: Job,
    hosts: list[Host],
    tool: Tool,
    *,
    ranks: int | None,
    explicit: bool,
    environment: dict[str, str],
    least: int = 1,
    without: dict[str, str] | None = None,
) -> int:
    """Run the job on ``hosts``; its exit code, as ``local.run``.

    ranks: in all, or None for each host's own number, which is ``least`` at least. explicit: slots
    are the user's words. environment: variables that he wants on all hosts. without: takes, by
    name, why hosts can't take part, and the others are enough; None: all are needed. Raises
    ValueError for his mistakes, for hosts that can't be reached, and for hosts that can't reach
    each other: before any rank starts.
    """
    check(replace(job, ranks=1))
    enough(job.min_hosts, len(hosts))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some for each host
    prctl(SUBREAPER, 1)
    interrupt = Interrupt()
    raise_on_end(interrupt.remember)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # until there are ranks to pass them on to
        signal.signal(number, signal.SIG_IGN)
    started = time.monotonic_ns()
    if job.min_hosts is not None:
        os.environ.setdefault("SLURM_NO_KILL", "set")  # or srun ends all agents with one host's
    contact = Contact(tool, [host.name for host in hosts], without=without)
    try:
        if not tool.passes_environment:
            environment = {**travelling(), **environment}
        terms = Terms(job, environment, secrets.token_hex(6))
        layout = Layout(hosts, ranks, explicit, least)
        there, on_each, interfaces, cores = _ready(terms, contact, layout, without)
        from .supervise import watch

        about = _about(job, there, on_each)
        live = Live(terms.run, there, about)
        remaining = Remaining(there, on_each, job.min_hosts, about, live.replace)
        returning = _returning(terms, tool, there, on_each, interfaces, cores)
        remaining.returning = returning if job.min_hosts is not None else None
        look, run_id = remaining.only(live.look), terms.run
        try:
            code = watch(job, there, seats(on_each), run_id, started, interrupt, look, remaining)
        finally:
            live.ending = True
            if job.record is not None and remaining.changed:  # before others write theirs
                sort_out(job.record, remaining.attempt)
            _end([*there, *remaining.came_back, *returning.close()])
            returning.disconnect()
            live.close()
    except TerminatedError as end:
        name = signal.Signals(end.number).name
        sys.stderr.write(f"paceline: {name} before the ranks started\n")
        return 128 + end.number
    finally:
        no_longer_end()
        contact.close()
        end_children(0.0)
    if job.record is not None:
        if remaining.changed:
            sort_out(job.record, remaining.attempt)
        lost = any(host.record_error for host in there)  # which was said
        if not lost or any(job.record.glob("*.ring")):
            tell(job, job.record, code)
    if interrupt.go_on_later:
        put_back()
    return code


@dataclass(frozen=True)
class Layout:
    """What is wanted of how many ranks, as ``run`` takes it."""

    hosts: list[Host]
    ranks: int | None
    explicit: bool
    least: int

    def of(self, found: list[There]) -> tuple[list[int], dict[str, int | None]]:
        """How many ranks each of these hosts gets, and which cores the scheduler gives there: from
        what the user, the scheduler and the hosts themselves say."""
        by_name = {host.name: host for host in self.hosts}
        if len(found) == len(self.hosts):  # a tool may know them by other names
            hosts = self.hosts
        else:
            hosts = [by_name.get(there.name, Host(there.name)) for there in found]
        known = [
            replace(host, name=there.name, devices=there.hello["devices"], numa=there.hello["numa"])
            for host, there in zip(hosts, found, strict=True)
        ]
        on_each = counts(known, self.ranks, self.explicit)
        if self.ranks is None and any(host.slots is None for host in hosts):
            on_each = [max(self.least, count) for count in on_each]
        return on_each, {host.name: host.cpus for host in known}


def _ready(
    terms: Terms, contact: Contact, layout: Layout, without: dict[str, str] | None
) -> tuple[list[There], list[int], list[tuple[str, str]], dict[str, int | None]]:
    """The hosts that get ranks, ready to start them, how many each, by which interface and address
    they reach each other, and their cores."""
    found = contact.make()
    found = _able(found, {host.name: other_versions(host) for host in found}, without)
    on_each, cores = layout.of(found)
    mistakes = check_there(terms, *_used(found, on_each), cores)
    if mistakes:
        found = _able(found, mistakes, without)
        on_each, cores = layout.of(found)  # other numbers, perhaps: to be told once more
        _able(found, check_there(terms, *_used(found, on_each), cores), None)
    there, on_each = _used(found, on_each)
    interfaces = _reach(there)
    label(terms)
    begin(terms, dict(enumerate(there)), interfaces)
    _say(there, on_each, interfaces, contact.tool)
    return there, on_each, interfaces, cores


def _used(hosts: list[There], on_each: list[int]) -> tuple[list[There], list[int]]:
    """Those that get ranks."""
    used = [host for host, count in zip(hosts, on_each, strict=True) if count]
    return used, [count for count in on_each if count]


def _able(
    hosts: list[There], mistakes: dict[str, str], without: dict[str, str] | None
) -> list[There]:
    """Without the hosts that can't take part; ValueError where all are needed, or none is left."""
    told = {name: why for name, why in mistakes.items() if why}
    left = [host for host in hosts if host.name not in told]
    if told and (without is None or not left):
        raise ValueError("\n".join(list(told.values())[:4]))
    if without is not None:
        without.update(told)
    return left


def _returning(
    terms: Terms,
    tool: Tool,
    hosts: list[There],
    on_each: list[int],
    interfaces: list[tuple[str, str]],
    cores: dict[str, int | None],
) -> Returning:
    """Who looks for hosts that were lost, and makes them ready once more. They reach the others
    as they did before."""
    names = [host.name for host in hosts]

    def prepare(place: int, host: There) -> None:
        host.name = names[place]
        _able([host], {host.name: other_versions(host)}, None)
        _able([host], check_there(terms, [host], [on_each[place]], cores), None)
        begin(terms, {place: host}, interfaces)

    return Returning(lambda place: Contact(tool, [names[place]], quiet=True), prepare)


def _reach(hosts: list[There]) -> list[tuple[str, str]]:
    """(interface, address) of each host, by which the others reach it: tried."""
    if len(hosts) == 1:
        return [("lo", "127.0.0.1")]
    for host in hosts:
        host.send(listen=asked())
    offers = [host.answer("listening", REACH_SECONDS)["listening"] for host in hosts]
    for me, host in enumerate(hosts):
        others = others_of(me, len(hosts))
        host.send(reach={str(other): offers[other] for other in others})
    tried = {
        me: {int(k): v for k, v in host.answer("reached", REACH_SECONDS)["reached"].items()}
        for me, host in enumerate(hosts)
    }
    return choose([host.name for host in hosts], offers, tried)


def _about(job: Job, hosts: list[There], on_each: list[int]) -> dict[str, Any]:
    """What a live view is told of the job."""
    record = str(job.record.absolute()) if job.record is not None else None
    names = [host.name for host in hosts]
    return {"command": [job.name, *job.args], "record": record, "hosts": names, "on_each": on_each}


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
        if host.trouble:
            host.last_words(SAY_SECONDS)
        waited = 0.0
        while not host.trouble and waited < END_SECONDS:
            try:
                host.answer("ended", SAY_SECONDS)
                break
            except SilentError:
                waited += SAY_SECONDS
                sys.stderr.write(f"paceline: waiting for {host.name} to end ...\n")
            except ValueError as mistake:
                if not host.trouble:  # that has been told where its ranks were lost
                    sys.stderr.write(f"paceline: {mistake}\n")
