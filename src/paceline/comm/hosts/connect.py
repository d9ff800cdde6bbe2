"""A rank's TCP connections to its peers on other hosts; a peer has to know a secret token."""

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...cluster.topology.network_interfaces import Link, network_links
from ...plurals import counted
from ...security.handshake import (
    DROPPED_CONNECTION_ERRORS,
    Acceptor,
    Handshake,
    HandshakeError,
    HandshakeStep,
    run_handshake,
)
from ..reachable_address import listen_on, of_names, requested_interface

CONNECT_TIMEOUT_S = 30.0  # for peers that are all known to be running
HANDSHAKE_TIMEOUT_S = 1.0  # for a visitor to send its introduction
# Delay before the first retry to a peer that dropped the connection; it doubles each time.
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 1.0
KEEPALIVE_INTERVAL_S = 5.0  # idle time of a connection before keepalive probes, and between them
MAX_KEEPALIVE_PROBES = 100  # unanswered, before the connection counts as lost
# without an acknowledgement: then the host is unreachable, not the rank late
MAX_SILENCE_MS = 12_000
_INTRODUCTION = struct.Struct("!32si")
_CONFIRMATION = b"+"
_LAST_ACK_OFFSET = (
    56  # of tcpi_last_ack_recv in struct tcp_info (linux/tcp.h): ms since the last acknowledgement
)

_connections: "weakref.WeakSet[Connections]" = weakref.WeakSet()


@dataclass(eq=False)
class Connections:
    """The connections of one rank, by host.

    Attributes:
        sockets: The connections.
        descriptions: The hosts as messages name them: "host2 (10.0.0.2)".
    """

    sockets: dict[int, socket.socket] = field(default_factory=dict)
    descriptions: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _connections.add(self)

    def close(self) -> None:
        for connection in self.sockets.values():
            connection.close()

    def is_unreachable(self, host: int) -> bool:
        """Return whether not even the kernel of that host has answered for MAX_SILENCE_MS."""
        try:
            tcp_info = self.sockets[host].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        except OSError:
            return False
        return bool(struct.unpack_from("I", tcp_info, _LAST_ACK_OFFSET)[0] > MAX_SILENCE_MS)


def _close_in_child() -> None:
    # A loader's worker that outlives its rank would keep the rank's connections open.
    for connections in list(_connections):
        connections.close()


os.register_at_fork(after_in_child=_close_in_child)


def exchange_links() -> list[Link]:
    """Return the network links for the exchange; the ranks of this host are spread over them.

    They are those that GLOO_SOCKET_IFNAME names, else the one by which MASTER_ADDR is reached.

    Raises OSError where there is none.
    """
    found = network_links()
    requested = requested_interface()
    if requested:
        matching = of_names(found, requested)
        if not matching:
            raise OSError(
                None, f"GLOO_SOCKET_IFNAME={requested} names no network interface that is up"
            )
        return matching
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", ""), 9))
        address = probe.getsockname()[0]
        by_address = [link for link in found if link.address == address]
        found = by_address or found
    if not found:
        raise OSError(None, "no network interface is up")
    return found[:1]


class PeerListener:
    """Listens for the connections of peers.

    address: what peers have to know: IP address, port, token and interface.
    """

    def __init__(self, link: Link) -> None:
        self._token = secrets.token_hex(16)
        self._listening = listen_on(link.address)
        port = self._listening.getsockname()[1]
        self.address = f"{link.address} {port} {self._token} {link.interface}"

    def close(self) -> None:
        self._listening.close()

    def connect_all(
        self, own_host: int, addresses: Mapping[int, str], host_names: Mapping[int, str]
    ) -> Connections:
        """Open one connection to every host of ``addresses``; of two hosts the later one connects.

        Raises OSError that names the host that could not be reached, and the address that was
        tried.
        """
        connections, deadline = Connections(), time.monotonic() + CONNECT_TIMEOUT_S
        try:
            for host, peer in addresses.items():
                address, port, token, interface = peer.split()
                connections.descriptions[host] = f"{host_names[host]} ({interface} {address})"
                if host < own_host:
                    connections.sockets[host] = _connect_with_retry(
                        address,
                        int(port),
                        token,
                        own_host,
                        connections.descriptions[host],
                        deadline,
                    )
            self._accept_peers(connections, set(addresses) - set(connections.sockets), deadline)
            for connection in connections.sockets.values():
                _configure(connection)
        except BaseException:
            connections.close()
            raise
        finally:
            self.close()
        return connections

    def _accept_peers(self, connections: Connections, missing: set[int], deadline: float) -> None:
        """Accept the connections of the missing hosts.

        Raises:
            OSError: Some have not come by the deadline.
        """
        if not missing:
            return
        with Acceptor(
            [self._listening], lambda _: self._handshake(), seconds=HANDSHAKE_TIMEOUT_S
        ) as acceptor:
            while missing:
                left = deadline - time.monotonic()
                if left <= 0:
                    missing_names = ", ".join(
                        connections.descriptions[host] for host in sorted(missing)
                    )
                    raise OSError(
                        None, f"no connection from {missing_names}{_strangers_note(acceptor)}"
                    )
                for visitor, host in acceptor.wait(left):
                    if host in missing:
                        missing.discard(host)
                        connections.sockets[host] = visitor
                    else:
                        visitor.close()

    def _handshake(self) -> Handshake[int]:
        """Read the token and the index of a peer's host, and confirm them."""
        token, host = _INTRODUCTION.unpack((yield HandshakeStep(read=_INTRODUCTION.size)))
        if not hmac.compare_digest(token, self._token.encode()):
            raise HandshakeError("the visitor does not know this rank's token")
        yield HandshakeStep(send=_CONFIRMATION)
        return int(host)


def _strangers_note(acceptor: Acceptor[int]) -> str:
    strangers = acceptor.strangers
    if not strangers.total:
        return ""
    return (
        f" ({counted(strangers.total, 'connection')} without this rank's token came from "
        f"{strangers})"
    )


def _connect_with_retry(
    address: str, port: int, token: str, own_host: int, description: str, deadline: float
) -> socket.socket:
    """Connect to a peer; retry where it drops the connection, as it may be busy with strangers.

    Raises:
        OSError: It can't be reached, or has not confirmed the connection by the deadline.
    """
    delay = FIRST_RETRY_S
    while True:
        try:
            return _connect(address, port, introduction(token, own_host), deadline)
        except OSError as error:
            dropped = isinstance(error, DROPPED_CONNECTION_ERRORS) and not isinstance(
                error, TimeoutError
            )
            if not dropped or time.monotonic() + delay > deadline:
                why = error.strerror or error
                raise OSError(None, f"no connection to {description}: {why}") from None
        time.sleep(delay)
        delay = min(2 * delay, MAX_RETRY_S)


def _connect(address: str, port: int, handshake: Handshake[None], deadline: float) -> socket.socket:
    connection = socket.create_connection((address, port), max(deadline - time.monotonic(), 0.001))
    try:
        run_handshake(connection, handshake, max(deadline - time.monotonic(), 0.001))
    except BaseException:
        connection.close()
        raise
    return connection


def introduction(token: str, own_host: int) -> Handshake[None]:
    """Send the peer's token and this host's index, and wait until the peer has confirmed them."""
    answer = yield HandshakeStep(
        send=_INTRODUCTION.pack(token.encode(), own_host), read=len(_CONFIRMATION)
    )
    if answer != _CONFIRMATION:
        raise HandshakeError("another program listens on this address")


def _configure(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(KEEPALIVE_INTERVAL_S))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(KEEPALIVE_INTERVAL_S))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MAX_KEEPALIVE_PROBES)
