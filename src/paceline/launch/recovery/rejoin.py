"""Connect to hosts that a job has lost or that are new, until they are ready to have ranks."""

import sys
import threading
import time
from collections.abc import Callable, Sequence

from ...cluster.schedulers.hostfile import Host
from ...comm.reachable_address import NEIGHBOURS, choose, requested_interface
from ...security.text import printable
from ..remote.prepare_hosts import (
    REACHABILITY_TIMEOUT_S,
    LaunchSpec,
    check_hosts,
    start_rank_servers,
    version_mismatch,
)
from ..remote.remote_host import RemoteHost
from ..remote.start_agents import AgentConnections
from ..remote.start_commands import LaunchTool

# between two attempts; each wait is twice as long as the one before
FIRST_RETRY_S, MAX_RETRY_S = 2.0, 30.0
JOIN_TIMEOUT_S = 5.0  # for the threads to end


class JoiningHosts:
    """Connect to lost and new hosts of a running job, with a thread for each, and prepare them.

    A host that returns has as many ranks, and uses the same network interface, as before. A new one
    without a number of ranks has as many as the first host.

    Args:
        hosts: Hosts of the job at its start.
        ranks_per_host: Their numbers of ranks.
        interfaces: (interface, address) of each.
        cores: Cores that the scheduler grants, by host name.
        peers: Returns the hosts that have ranks now, which must reach a new host.
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
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._connections: list[AgentConnections] = []
        self._preparing: dict[int, RemoteHost] = {}
        self._ready: dict[int, RemoteHost] = {}
        self._threads: dict[int, threading.Thread] = {}

    def add(self, host: Host) -> None:
        """Have a new host join. Called by one thread at a time."""
        self._hosts.append(host)
        self._interfaces.append(("", ""))  # not known yet
        self.wait_for(len(self._hosts) - 1)

    def wait_for(self, host_index: int) -> None:
        """Try to connect to a host until that succeeds."""
        if host_index in self._threads and self._threads[host_index].is_alive():
            return
        thread = threading.Thread(target=self._wait_for, args=(host_index,), daemon=True)
        self._threads[host_index] = thread
        thread.start()

    def ready(self) -> dict[int, RemoteHost]:
        """Return hosts that could have ranks now, by index."""
        with self._lock:
            return {
                host_index: host
                for host_index, host in sorted(self._ready.items())
                if not host.failure
            }

    def take_ready(self) -> dict[int, RemoteHost]:
        """Return hosts that could have ranks now, and hand them over. Retry those that were lost
        again.
        """
        with self._lock:
            ready_hosts, self._ready = self._ready, {}
        for host_index in [host_index for host_index, host in ready_hosts.items() if host.failure]:
            del ready_hosts[host_index]
            self.wait_for(host_index)
        return ready_hosts

    def close(self) -> list[RemoteHost]:
        """Stop waiting. Return the hosts that are ready and were not taken."""
        self._closing.set()
        with self._lock:
            ready_hosts, self._ready = list(self._ready.values()), {}
            for host in self._preparing.values():
                host.give_up()
            unconnected = [connection for connection in self._connections if not connection.hosts]
        for connection in unconnected:
            connection.close()
        for thread in list(self._threads.values()):
            thread.join(JOIN_TIMEOUT_S)
        return ready_hosts

    def disconnect(self) -> None:
        """Close the connections; call this after the agents were asked to end."""
        for connection in self._connections:
            connection.close()

    def _wait_for(self, host_index: int) -> None:
        wait = FIRST_RETRY_S
        while not self._closing.wait(wait):
            connection = AgentConnections(self._tool, [self._hosts[host_index].name], quiet=True)
            with self._lock:
                self._connections.append(connection)
            try:
                (host,) = connection.start()
                with self._lock:
                    if self._closing.is_set():
                        raise ValueError("the job is over")
                    self._preparing[host_index] = host
                self._prepare(host_index, host)
                with self._lock:
                    self._ready[host_index] = self._preparing.pop(host_index)
                return
            except (ValueError, OSError) as error:
                connection.close()
                if not self._closing.is_set():
                    self._report(host_index, str(error))
                with self._lock:
                    self._preparing.pop(host_index, None)
                    self._connections.remove(connection)
            wait = min(2 * wait, MAX_RETRY_S)

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
    host.send(listen=requested_interface())
    offer = host.wait_for_answer("listening", REACHABILITY_TIMEOUT_S)["listening"]
    for peer in peers:
        peer.send(reach={request: offer})
    reached = [_reached(peer, request) for peer in peers]
    tried = {number: {0: answer} for number, answer in enumerate(reached, start=1)}
    return choose([known.name for known in (host, *peers)], [offer], tried)[0]


def _reached(peer: RemoteHost, request: str) -> dict[str, str]:
    """Return the answer of a host to one request, without late answers to earlier ones."""
    until = time.monotonic() + REACHABILITY_TIMEOUT_S
    while True:
        left_s = max(until - time.monotonic(), 0.0)
        answers: dict[str, dict[str, str]] = peer.wait_for_answer("reached", left_s)["reached"]
        if request in answers:
            return answers[request]
