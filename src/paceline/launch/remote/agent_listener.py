"""Accept the agents that connect back to the launcher (srun, jsrun, mpirun, flux)."""

import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from ...cluster.topology.network_interfaces import is_here, links
from ...comm.reachable_address import asked, listen_on, of_names
from ...security.greeting import Acceptor
from ..channel import channel_of_visitor, host_greeting, new_secret
from .remote_host import RemoteHost

PLACE_SECONDS = 120.0  # from an agent's greeting until it has said which agent it is
POLL_SECONDS = 0.02  # between two looks for that message
RESOLVE_SECONDS = 5.0  # for the names of all nodes
MANY_STRANGERS = 100  # that are worth a warning, though the job has started


class AgentListener:
    """Listen for a job's agents until each has proved that it knows the secret, and which it is.

    One thread serves all connections: visitors that do not know the secret occupy none, and are
    closed after a second (``security.greeting``).

    Args:
        names: Names of the nodes that agents will come from.

    Attributes:
        secret: What agents have to know.
        where: The launcher's addresses for agents: ``ADDRESS,PORT;ADDRESS,PORT``.
        found: The agents by place: the number that the scheduler's tool has given them.
        visitors: All that knew the secret; the caller closes them.
        twice: Place that two agents have said, or None.
    """

    def __init__(self, names: list[str]) -> None:
        self.secret = new_secret()
        sockets, self.where = _listen(addresses_towards(names))
        self._acceptor = Acceptor(sockets, lambda _: host_greeting(self.secret))
        self._number = len(names)
        self.found: dict[int, RemoteHost] = {}
        self.visitors: list[RemoteHost] = []
        self.twice: int | None = None
        self._unplaced: dict[RemoteHost, float] = {}  # until when they are waited for

    def __enter__(self) -> "AgentListener":
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()

    def wait(self, seconds: float) -> None:
        """Serve visitors for about ``seconds``; ``found`` and ``twice`` are up to date then."""
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
        """Return how many visitors did not know the secret and where they came from, or ""."""
        strangers = self._acceptor.strangers
        if not strangers.total:
            return ""
        return (
            f"{strangers.total} connections that don't know the job's secret came from {strangers}"
        )

    @property
    def many_strangers(self) -> bool:
        """Return whether there were more strangers than a port scan would make."""
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
            raise ValueError(f"an agent says that its number is {place!r}")
        if place in self.found:
            self.twice = place
        if place < self._number:
            self.found[place] = host


def _listen(addresses: list[str]) -> tuple[list[socket.socket], str]:
    """Listen on each address, or on all interfaces where there is none."""
    with ExitStack() as opened, suppress(OSError):
        sockets = [opened.enter_context(listen_on(address)) for address in addresses]
        if sockets:
            opened.pop_all()
            pairs = zip(addresses, sockets, strict=True)
            return sockets, ";".join(f"{at},{one.getsockname()[1]}" for at, one in pairs)
    one = listen_on("")
    addresses = [link.address for link in links() if ":" not in link.address] or ["127.0.0.1"]
    return [one], ";".join(f"{address},{one.getsockname()[1]}" for address in addresses)


def addresses_towards(names: list[str]) -> list[str]:
    """Return this host's addresses that the nodes can connect to.

    Those of the interfaces that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names; else those that
    the kernel sends from towards each node, or 127.0.0.1 where all nodes are this host. Empty
    where a node's name does not resolve: the scheduler may know it by another one.
    """
    only = asked()
    named = [link.address for link in of_names(links(), only)] if only else []
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
    """Return this host's addresses on the way to another one; none for this host itself.

    Raises:
        OSError: The name does not resolve, or no address of it can be reached.
    """
    name = name.rpartition("@")[2]
    if is_here(name):
        return []
    found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    found = [one for one in found if one[0] == socket.AF_INET] or found
    sources = []
    for family, kind, _, _, where in found:
        with socket.socket(family, kind) as probe:  # connect sends nothing here
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
