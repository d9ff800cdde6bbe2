"""Choice of an address at which each host can be reached, by trying to connect.

The name of a host with two networks may resolve to an address that other hosts cannot reach. Ranks
then wait for each other until a timeout of half an hour. To prevent this, every host listens on
each of its addresses. The other hosts connect to them and compare the token that they receive,
because the private address of a bridge exists on every host. Of each host, the best address that
all others have reached is used. This module uses plain sockets, without torch.
"""

import contextlib
import os
import secrets
import selectors
import socket
import time
from typing import Any

from ..cluster.topology.network_interfaces import Link, network_links

SECONDS = 3.0  # timeout of a connection; on the job's network it takes less than 1 ms
TOKEN_BYTES = 16
MAX_ANSWERED_PER_TURN = 64  # connections, before other file descriptors are polled again
NEIGHBOURS = 16  # other hosts that each host tries; in most jobs these are all


class Listener:
    """Sockets that listen on each of this host's addresses and send a token to each connection.

    Attributes:
        token: Random bytes that identify this host.
        sockets: The listening socket of each interface and address.

    The argument ``only`` is the value of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, if set.
    """

    def __init__(self, only: str | None = None) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.sockets: dict[Link, socket.socket] = {}
        for link in of_names(network_links(), only):
            try:
                self.sockets[link] = listen_on(link.address)
            except OSError:
                continue  # an address that cannot be listened on cannot be offered

    def offer(self) -> dict[str, Any]:
        """Return what other hosts need to try this host, as a JSON-compatible dict."""
        return {
            "token": self.token.hex(),
            "links": [
                [link.interface, link.address, link.speed, socket_.getsockname()[1]]
                for link, socket_ in self.sockets.items()
            ],
        }

    def answer(self, listening: socket.socket) -> None:
        """Send the token to the connections on one of ``sockets``. Nothing is read from them."""
        for _ in range(MAX_ANSWERED_PER_TURN):
            try:
                visitor, _ = listening.accept()
            except OSError:
                return
            with visitor, contextlib.suppress(OSError):
                visitor.setblocking(False)
                visitor.send(self.token)

    def close(self) -> None:
        for listening in self.sockets.values():
            listening.close()
        self.sockets.clear()


def listen_on(address: str, port: int = 0) -> socket.socket:
    """Return a non-blocking listening TCP socket on one address; port 0 selects a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(4096)
    except OSError:
        listening.close()
        raise
    listening.setblocking(False)
    return listening


def check_loopback() -> None:
    """Raise ValueError where processes of this node can't connect to 127.0.0.1."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            probe.connect(probe.getsockname())
    except OSError as error:
        raise ValueError(
            "the loopback interface of this node can't be used (127.0.0.1: "
            f"{error.strerror}). HINT: ip link set lo up; ip addr replace 127.0.0.1/8 dev lo"
        ) from None


def variables(interface: str) -> dict[str, str]:
    """Return the environment variables that make gloo, NCCL and TensorPipe use one interface.

    For loopback, on a single host, only gloo's variable: gloo would resolve the host's name
    otherwise.
    """
    if interface == "lo":
        return {"GLOO_SOCKET_IFNAME": "lo"}
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # without "=", NCCL matches the name as a prefix
        "TP_SOCKET_IFNAME": interface,
    }


def requested_interface() -> str | None:
    """Return the user's value of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")


def of_names(found: list[Link], only: str | None) -> list[Link]:
    """Return the links whose interface matches GLOO_SOCKET_IFNAME's or NCCL_SOCKET_IFNAME's value.

    All links if ``only`` is None or empty.
    """
    return [link for link in found if not only or _named(link.interface, only)]


def others_of(me: int, hosts: int) -> list[int]:
    """Return the hosts that host ``me`` tries: all; in large jobs the first and the next ones."""
    after = [(me + i) % hosts for i in range(1, min(NEIGHBOURS, hosts - 1) + 1)]
    return sorted({0, *after} - {me})


def try_all(
    offers: dict[int, dict[str, Any]], listener: Listener | None = None
) -> dict[int, dict[str, str]]:
    """Connect to all addresses of all offers concurrently, within ``SECONDS``.

    Return for each host and address an empty string if it was reached, else the reason. Meanwhile
    ``listener`` answers its connections.
    """
    results: dict[int, dict[str, str]] = {host: {} for host in offers}
    selector = selectors.DefaultSelector()
    waiting = 0
    for host, offer in offers.items():
        for _, address, _, port in offer["links"]:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            attempt = None
            try:
                attempt = socket.socket(family, socket.SOCK_STREAM)
                attempt.setblocking(False)
                attempt.connect((address, port))
            except BlockingIOError:
                pass
            except OSError as error:
                results[host][address] = error.strerror or str(error)
                if attempt is not None:
                    attempt.close()
                continue
            assert attempt is not None
            waits = (attempt, host, address, offer["token"])
            selector.register(attempt, selectors.EVENT_READ, waits)
            waiting += 1
    for listening in listener.sockets.values() if listener is not None else ():
        selector.register(listening, selectors.EVENT_READ, (listening, None, "", ""))
    deadline = time.monotonic() + SECONDS
    while waiting and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            connection, host, address, token = key.data
            if host is None:
                assert listener is not None
                listener.answer(connection)
                continue
            results[host][address] = _verdict(connection, token)
            selector.unregister(connection)
            connection.close()
            waiting -= 1
    for key in list(selector.get_map().values()):
        connection, host, address, _ = key.data
        if host is not None:
            results[host][address] = f"no answer in {SECONDS:.0f} s"
            connection.close()
    selector.close()
    return results


def choose(
    names: list[str], offers: list[dict[str, Any]], tried: dict[int, dict[int, dict[str, str]]]
) -> list[tuple[str, str]]:
    """Return (interface, address) of each host at which all hosts that tried it have reached it.

    Args:
        tried: Result of ``try_all`` on each host.

    Raises:
        ValueError: A host has no such address. The message lists what was tried.
    """
    chosen = []
    for host, offer in enumerate(offers):
        seen = {who: results[host] for who, results in tried.items() if host in results}
        for interface, address, _, _ in offer["links"]:
            if all(of_one.get(address) == "" for of_one in seen.values()):
                chosen.append((interface, address))
                break
        else:
            raise ValueError(_unreachable(names, host, offer, seen))
    return chosen


def _unreachable(
    names: list[str], host: int, offer: dict[str, Any], seen: dict[int, dict[str, str]]
) -> str:
    lines = [f"{names[host]} can't be reached by the other hosts. Tried:"]
    for interface, address, _, _ in offer["links"]:
        failed = {who: answer[address] for who, answer in seen.items() if answer.get(address, "")}
        for who, why in list(failed.items())[:3]:
            lines.append(f"    from {names[who]}: {interface} {address}: {why}")
    if not offer["links"]:
        lines.append(
            f"    {names[host]} has no network interface that is up, or none of GLOO_SOCKET_IFNAME"
        )
    lines.append(
        "HINT: open the firewall between these hosts, or select an interface: "
        "GLOO_SOCKET_IFNAME=NAME"
    )
    return "\n".join(lines)


def _verdict(attempt: socket.socket, token: str) -> str:
    """Return an empty string if the right token was received, else the reason."""
    try:
        answer = attempt.recv(TOKEN_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer.hex() == token else "another host has this address as well"


def _named(interface: str, only: str) -> bool:
    """Return whether an interface matches the value of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.

    The value is a list of name prefixes. In NCCL's, =name is an exact name, and ^name excludes.
    """
    exclude, exact = only.startswith("^"), only.lstrip("^").startswith("=")
    names = [name for name in only.lstrip("^").lstrip("=").split(",") if name]
    found = any(interface == name or (not exact and interface.startswith(name)) for name in names)
    return found != exclude
