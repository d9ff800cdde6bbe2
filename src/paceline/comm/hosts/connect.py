"""A rank's connections to its peers on other hosts: TCP, and who knocks has to know a word."""

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

from ...cluster.topology.network_interfaces import Link, links
from ...security.greeting import DROPPED, Acceptor, Greeting, RefusedError, Step, converse
from ..reachable_address import asked, listen_on, of_names

CONNECT_S = 30.0  # within which peers come, all of which are known to be there
WORD_S = 1.0  # within which who has come has said its word
# Pauses before a peer that was dropped knocks again; each is twice as long.
RETRY_S, MAX_RETRY_S = 0.05, 1.0
LOOKS_S = 5.0  # without a word: then it is looked whether the peer's host still answers
PROBES = 100  # without an answer, before the connection counts as lost
DARK_MS = 12_000  # without an answer to those looks: it is not the peer that is late
_WORD = struct.Struct("!32si")
_WELCOME = b"+"
_LAST_ANSWER = (
    56  # where tcp_info has the milliseconds since the last acknowledgement (linux/tcp.h)
)

_connections: "weakref.WeakSet[Connections]" = weakref.WeakSet()


@dataclass(eq=False)
class Connections:
    """sockets: by host. of: what is said of them, by host: "host2 (10.0.0.2)"."""

    sockets: dict[int, socket.socket] = field(default_factory=dict)
    of: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _connections.add(self)

    def close(self) -> None:
        for one in self.sockets.values():
            one.close()

    def dark(self, host: int) -> bool:
        """Whether that host has not answered for a while, not even its kernel."""
        try:
            told = self.sockets[host].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        except OSError:
            return False
        return bool(struct.unpack_from("I", told, _LAST_ANSWER)[0] > DARK_MS)


def _left_in_child() -> None:
    # A loader's worker that outlives its rank would keep the rank's connections open.
    for one in list(_connections):
        one.close()


os.register_at_fork(after_in_child=_left_in_child)


def links_here() -> list[Link]:
    """The network links by which this host exchanges, which its ranks take in turn: those that
    GLOO_SOCKET_IFNAME names, else the one by which MASTER_ADDR is reached.

    Raises OSError where there is none."""
    found = links()
    only = asked()
    if only:
        named = of_names(found, only)
        if not named:
            raise OSError(None, f"no interface is up that GLOO_SOCKET_IFNAME={only} names")
        return named
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", ""), 9))
        address = probe.getsockname()[0]
        by_address = [link for link in found if link.address == address]
        found = by_address or found
    if not found:
        raise OSError(None, "it has no network interface that is up")
    return found[:1]


class Door:
    """Where peers knock. told: what they have to know."""

    def __init__(self, link: Link) -> None:
        self._token = secrets.token_hex(16)
        self._listening = listen_on(link.address)
        port = self._listening.getsockname()[1]
        self.told = f"{link.address} {port} {self._token} {link.interface}"

    def close(self) -> None:
        self._listening.close()

    def meet(self, me: int, doors: Mapping[int, str], names: Mapping[int, str]) -> Connections:
        """One connection to every host of ``doors``: the later of two hosts goes to the earlier.

        Raises OSError that names who could not be met, and where that was tried.
        """
        met, deadline = Connections(), time.monotonic() + CONNECT_S
        try:
            for host, told in doors.items():
                address, port, token, interface = told.split()
                met.of[host] = f"{names[host]} ({interface} {address})"
                if host < me:
                    met.sockets[host] = _knock(
                        address, int(port), token, me, met.of[host], deadline
                    )
            self._admit(met, set(doors) - set(met.sockets), deadline)
            for one in met.sockets.values():
                _ready(one)
        except BaseException:
            met.close()
            raise
        finally:
            self.close()
        return met

    def _admit(self, met: Connections, missing: set[int], deadline: float) -> None:
        """Take the connections of the hosts that are missing.

        Raises:
            OSError: Some have not come by the deadline.
        """
        if not missing:
            return
        with Acceptor([self._listening], lambda _: self._greeting(), seconds=WORD_S) as acceptor:
            while missing:
                left = deadline - time.monotonic()
                if left <= 0:
                    names = ", ".join(met.of[host] for host in sorted(missing))
                    raise OSError(None, f"no connection from {names}{_note(acceptor)}")
                for visitor, host in acceptor.wait(left):
                    if host in missing:
                        missing.discard(host)
                        met.sockets[host] = visitor
                    else:
                        visitor.close()

    def _greeting(self) -> Greeting[int]:
        """Read the token and the number of a peer's host, and confirm them."""
        token, host = _WORD.unpack((yield Step(read=_WORD.size)))
        if not hmac.compare_digest(token, self._token.encode()):
            raise RefusedError("the visitor does not know this rank's token")
        yield Step(send=_WELCOME)
        return int(host)


def _note(acceptor: Acceptor[int]) -> str:
    strangers = acceptor.strangers
    if not strangers.total:
        return ""
    return (
        f" ({strangers.total} connections that don't know the rank's token came from {strangers})"
    )


def _knock(
    address: str, port: int, token: str, me: int, named: str, deadline: float
) -> socket.socket:
    """Connect to a peer, and again where it drops us: it may be busy with strangers.

    Raises:
        OSError: It can't be reached, or has not confirmed the connection by the deadline.
    """
    wait = RETRY_S
    while True:
        try:
            return _connected(address, port, introduction(token, me), deadline)
        except OSError as error:
            dropped = isinstance(error, DROPPED) and not isinstance(error, TimeoutError)
            if not dropped or time.monotonic() + wait > deadline:
                why = error.strerror or error
                raise OSError(None, f"no connection to {named}: {why}") from None
        time.sleep(wait)
        wait = min(2 * wait, MAX_RETRY_S)


def _connected(address: str, port: int, greeting: Greeting[None], deadline: float) -> socket.socket:
    found = socket.create_connection((address, port), max(deadline - time.monotonic(), 0.001))
    try:
        converse(found, greeting, max(deadline - time.monotonic(), 0.001))
    except BaseException:
        found.close()
        raise
    return found


def introduction(token: str, me: int) -> Greeting[None]:
    """Say the peer's token and this host's number, and wait until the peer has confirmed them."""
    said = yield Step(send=_WORD.pack(token.encode(), me), read=len(_WELCOME))
    if said != _WELCOME:
        raise RefusedError("another program listens there")


def _ready(one: socket.socket) -> None:
    one.setblocking(False)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(LOOKS_S))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(LOOKS_S))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
