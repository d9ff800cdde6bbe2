"""Prepare hosts that join a running job: lost ones that return, and new ones."""

import sys
import threading
import time
from collections.abc import Callable, Sequence

from ...cluster.schedulers.hostfile import Host
from ...comm.reachable_address import NEIGHBOURS, asked, choose
from ...security.text import printable
from ..remote.prepare_hosts import LaunchSpec, check_hosts, start_rank_servers, version_mismatch
from ..remote.remote_host import RemoteHost
from ..remote.start_agents import AgentConnections
from ..remote.start_commands import LaunchTool
from .rejoin import LostHostWatcher

REACHABILITY_TIMEOUT_S = 30.0


class JoiningHosts:
    """What is known of the hosts of a job, by which they are prepared again.

    A host that returns has as many ranks, and uses the same network interface, as before. A new one
    without a number of ranks has as many as the first host.

    Args:
        hosts: Hosts of the job at its start.
        ranks_per_host: Their numbers of ranks.
        interfaces: (interface, address) of each.
        cores: Cores that the scheduler grants, by host name.
        peers: Returns the hosts that have ranks now, which must reach a new host.

    Attributes:
        watcher: Connects to hosts until they are ready.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        tool: LaunchTool,
        hosts: Sequence[RemoteHost],
        ranks_per_host: Sequence[int],
        interfaces: Sequence[tuple[str, str]],
        cores: dict[str, int | None],
        peers: Callable[[], list[RemoteHost]],
    ) -> None:
        self._spec, self._tool, self._cores, self._peers = spec, tool, cores, peers
        # by host index
        self._hosts = [
            Host(host.name, count) for host, count in zip(hosts, ranks_per_host, strict=True)
        ]
        self._interfaces = list(interfaces)
        self._reported = set(range(len(hosts)))  # of a host that was lost, nothing is printed
        # Answers of peers do not name the new host: one host after the other asks, each with the
        # number of its request, which no late answer to another one has.
        self._choosing, self._requests = threading.Lock(), len(hosts)
        self.watcher = LostHostWatcher(self._connect, self._prepare, self._report)

    def add(self, host: Host) -> None:
        """Have a new host join. Called by one thread at a time."""
        self._hosts.append(host)
        self._interfaces.append(("", ""))  # not known yet
        self.watcher.wait_for(len(self._hosts) - 1)

    def _connect(self, host_index: int) -> AgentConnections:
        return AgentConnections(self._tool, [self._hosts[host_index].name], quiet=True)

    def _prepare(self, host_index: int, host: RemoteHost) -> None:
        known = self._hosts[host_index]
        host.name = known.name
        _refuse(version_mismatch(host))
        host.ranks = known.slots or self._hosts[0].slots or 1
        _refuse(check_hosts(self._spec, [host], [host.ranks], self._cores).get(host.name, ""))
        if not self._interfaces[host_index][0]:
            with self._choosing:
                self._requests += 1
                chosen = _choose_address(host, self._peers(), str(self._requests))
            self._interfaces[host_index] = chosen
        start_rank_servers(self._spec, {host_index: host}, self._interfaces)

    def _report(self, host_index: int, reason: str) -> None:
        """Print why a new host can't be used, once."""
        if host_index not in self._reported:
            self._reported.add(host_index)
            name = self._hosts[host_index].name
            sys.stderr.write(
                f"paceline: warning: {name}, a new host, can't have ranks: {printable(reason)}\n"
                "paceline: Paceline tries again until the job ends\n"
            )


def _refuse(mistake: str) -> None:
    if mistake:
        raise ValueError(mistake)


def _choose_address(host: RemoteHost, peers: list[RemoteHost], request: str) -> tuple[str, str]:
    """Return the (interface, address) at which the hosts of the job reach a new one.

    Args:
        host: The new host.
        peers: Hosts that have ranks now.
        request: Number of this request in the messages of the peers.
    """
    peers = peers[:NEIGHBOURS]
    host.send(listen=asked())
    offer = host.wait_for_answer("listening", REACHABILITY_TIMEOUT_S)["listening"]
    for peer in peers:
        peer.send(reach={request: offer})
    reached = [_reached(peer, request) for peer in peers]
    tried = {number: {0: one} for number, one in enumerate(reached, start=1)}
    return choose([one.name for one in (host, *peers)], [offer], tried)[0]


def _reached(peer: RemoteHost, request: str) -> dict[str, str]:
    """Return the answer of a host to one request, without late answers to earlier ones."""
    until = time.monotonic() + REACHABILITY_TIMEOUT_S
    while True:
        left_s = max(until - time.monotonic(), 0.0)
        answers: dict[str, dict[str, str]] = peer.wait_for_answer("reached", left_s)["reached"]
        if request in answers:
            return answers[request]
