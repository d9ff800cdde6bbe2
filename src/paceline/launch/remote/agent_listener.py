"""Listener for agents that connect back to the launcher (started by srun, jsrun, mpirun, flux)."""

import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from ...cluster.topology.network_interfaces import is_local_host, network_links
from ...comm.reachable_address import asked, listen_on, of_names
from ...security.handshake import Acceptor
from ..channel import channel_of_visitor, host_handshake, new_secret
from .remote_host import RemoteHost

PLACE_SECONDS = 120.0  # timeout from an agent's handshake to the message with its index
POLL_SECONDS = 0.02  # between two polls for that message
RESOLVE_SECONDS = 5.0  # timeout for resolving the names of all nodes
MANY_STRANGERS = 100  # unauthenticated connections that justify a warning in a job that has started


class AgentListener:
    """Listening sockets for a job's agents, which authenticate by the secret and send their index.

    One thread serves all connections. A connection without the secret occupies no thread, and is
    closed after a second (``security.handshake``).

    Args:
        names: Names of the nodes from which agents will connect.

    Attributes:
        secret: Secret by which agents authenticate.
        where: The launcher's addresses for agents: ``ADDRESS,PORT;ADDRESS,PORT``.
        found: The agents, by the index that the scheduler's launch tool has assigned to each.
        visitors: All authenticated connections; the caller closes them.
        twice: Index that two agents have sent, or None.
    """

    def __init__(self, names: list[str]) -> None:
        self.secret = new_secret()
        sockets, self.where = _listen(addresses_towards(names))
        self._acceptor = Acceptor(sockets, lambda _: host_handshake(self.secret))
        self._number = len(names)
        self.found: dict[int, RemoteHost] = {}
        self.visitors: list[RemoteHost] = []
        self.twice: int | None = None
        self._unplaced: dict[RemoteHost, float] = {}  # deadline for the index, by agent

    def __enter__(self) -> "AgentListener":
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()

    def wait(self, seconds: float) -> None:
        """Serve connections for about ``seconds``, then return. Updates ``found`` and ``twice``."""
        wait = min(seconds, POLL_SECONDS) if self._unplaced else seconds
        for visitor, nonces in self._acceptor.wait(wait):
            self._admit(visitor, nonces)
        for host, deadline in list(self._unplaced.items()):
            try:
                answer = host.poll_answer("place")
                if answer is None and time.monotonic() < deadline:
                    continue
                self._unplaced.pop(host)
                self._place(host, answer)
            except ValueError:
                self._unplaced.pop(host, None)
                host.close()

    def strangers(self) -> str:
        """Return a message with the number and origin of unauthenticated connections, or ""."""
        strangers = self._acceptor.strangers
        if not strangers.total:
            return ""
        return (
            f"{strangers.total} connections that don't know the job's secret came from {strangers}"
        )

    @property
    def many_strangers(self) -> bool:
        """Whether there were more unauthenticated connections than a port scan would make."""
        return self._acceptor.strangers.total > MANY_STRANGERS

    def _admit(self, visitor: socket.socket, nonces: bytes) -> None:
        try:
            channel = channel_of_visitor(visitor, self.secret, nonces)
        except OSError:
            visitor.close()
            return
        host = RemoteHost("", channel, channel.close)
        self.visitors.append(host)
        self._unplaced[host] = time.monotonic() + PLACE_SECONDS
        if len(self._unplaced) > 2 * self._number + 16:
            oldest = next(iter(self._unplaced))
            del self._unplaced[oldest]
            oldest.close()

    def _place(self, host: RemoteHost, answer: dict[str, object] | None) -> None:
        place = answer.get("place") if answer is not None else None
        if not isinstance(place, int) or place < 0:
            raise ValueError(f"an agent sent the number {place!r}")
        if place in self.found:
            self.twice = place
        if place < self._number:
            self.found[place] = host


def _listen(addresses: list[str]) -> tuple[list[socket.socket], str]:
    """Listen on each address, or on all interfaces if there is none or one can't be used.

    Returns:
        The sockets, and the addresses in the form ``ADDRESS,PORT;ADDRESS,PORT``.
    """
    with ExitStack() as opened, suppress(OSError):
        sockets = [opened.enter_context(listen_on(address)) for address in addresses]
        if sockets:
            opened.pop_all()
            pairs = zip(addresses, sockets, strict=True)
            return sockets, ";".join(f"{at},{one.getsockname()[1]}" for at, one in pairs)
    one = listen_on("")
    addresses = [link.address for link in network_links() if ":" not in link.address] or [
        "127.0.0.1"
    ]
    return [one], ";".join(f"{address},{one.getsockname()[1]}" for address in addresses)


def addresses_towards(names: list[str]) -> list[str]:
    """Return this host's addresses to which the nodes can connect.

    These are the addresses of the interfaces in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, if set.
    Otherwise they are the source addresses that the kernel selects towards each node, or 127.0.0.1
    if all nodes are this host. The list is empty if the name of a node does not resolve: the
    scheduler may use another name than the network.
    """
    only = asked()
    named = [link.address for link in of_names(network_links(), only)] if only else []
    if named:
        return named
    pool = ThreadPoolExecutor(32)
    try:
        routes = list(pool.map(_sources, dict.fromkeys(names), timeout=RESOLVE_SECONDS))
    except (OSError, TimeoutError, UnicodeError):
        return []
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return _unique(address for route in routes for address in route) or ["127.0.0.1"]


def _sources(name: str) -> list[str]:
    """Return this host's source addresses towards host ``name``; none for this host itself.

    Raises:
        OSError: The name does not resolve, or none of its addresses can be reached.
    """
    name = name.rpartition("@")[2]
    if is_local_host(name):
        return []
    found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    found = [one for one in found if one[0] == socket.AF_INET] or found
    sources = []
    for family, kind, _, _, where in found:
        with socket.socket(family, kind) as probe:  # connect() of a UDP socket sends nothing
            try:
                probe.connect(where)
            except OSError as error:
                failed = error
                continue
            sources.append(str(probe.getsockname()[0]))
    sources = [address for address in sources if not address.startswith("fe80:")]
    if not sources:
        raise failed if found else OSError(f"{name} has no address")
    return sources


def _unique(addresses: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(addresses))
