"""By which of its addresses each host can be reached: found by trying, before anybody waits.

A host with two networks may answer to a name by the one that leads nowhere; ranks then wait for
each other until a timeout of half an hour. Here every host listens on each of its addresses,
the others connect to them and compare the token they get (a bridge's private address exists on
every host), and each host's best address that all others reached is the one that is used.
Plain sockets; no torch.
"""

import contextlib
import os
import secrets
import selectors
import socket
import time
from typing import Any

from ..cluster.topology.network_interfaces import Link, links

SECONDS = 3.0  # for a connection on the job's own network, where it takes less than 1 ms
TOKEN_BYTES = 16
MAX_ANSWERED_PER_TURN = 64  # before other descriptors are looked at again
NEIGHBOURS = 16  # each host tries this many others; all of them in most jobs


class Listener:
    """Listens on each of this host's addresses and shows its token to who comes.

    only: what GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME says, where the user has set it.
    """

    def __init__(self, only: str | None = None) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.sockets: dict[Link, socket.socket] = {}
        for link in of_names(links(), only):
            try:
                self.sockets[link] = listen_on(link.address)
            except OSError:
                continue  # an address that can't be listened on can't be offered

    def offer(self) -> dict[str, Any]:
        """What the others need to try this host; plain data."""
        return {
            "token": self.token.hex(),
            "links": [
                [link.interface, link.address, link.speed, socket_.getsockname()[1]]
                for link, socket_ in self.sockets.items()
            ],
        }

    def answer(self, listening: socket.socket) -> None:
        """Show the token to those who have connected to one of ``sockets``. Nothing is read."""
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
    """A listening TCP socket on one address; port 0 finds a free one."""
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


def variables(interface: str) -> dict[str, str]:
    """What makes gloo, NCCL and TensorPipe use one interface and no other; of one host's
    loopback, gloo alone, which would else ask for the host's name."""
    if interface == "lo":
        return {"GLOO_SOCKET_IFNAME": "lo"}
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # without = it is the beginning of a name
        "TP_SOCKET_IFNAME": interface,
    }


def asked() -> str | None:
    """The interfaces that the user wants."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")


def of_names(found: list[Link], only: str | None) -> list[Link]:
    """Those of ``found`` that GLOO_SOCKET_IFNAME's or NCCL_SOCKET_IFNAME's words mean; all without
    these."""
    return [link for link in found if not only or _named(link.interface, only)]


def others_of(me: int, hosts: int) -> list[int]:
    """The hosts that host ``me`` tries: all, or in a large job the first and the next ones."""
    after = [(me + i) % hosts for i in range(1, min(NEIGHBOURS, hosts - 1) + 1)]
    return sorted({0, *after} - {me})


def try_all(
    offers: dict[int, dict[str, Any]], listener: Listener | None = None
) -> dict[int, dict[str, str]]:
    """Connect to every address of every offer at once; for each host, address: "" where it was
    reached, else why not. Answers ``listener``'s visitors meanwhile. Takes ``SECONDS`` at most."""
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
    """(interface, address) of each host, by which all hosts that tried it reached it.

    tried: of each host, what ``try_all`` returned. Raises ValueError that names what was tried
    where a host has no such address.
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
        failed = {who: said[address] for who, said in seen.items() if said.get(address, "")}
        for who, why in list(failed.items())[:3]:
            lines.append(f"    from {names[who]}: {interface} {address}: {why}")
    if not offer["links"]:
        lines.append("    it has no network interface that is up, or none of GLOO_SOCKET_IFNAME")
    lines.append(
        "HINT: is there a firewall between these hosts? GLOO_SOCKET_IFNAME=NAME takes one interface"
    )
    return "\n".join(lines)


def _verdict(attempt: socket.socket, token: str) -> str:
    """ "" if the token came, else what was wrong."""
    try:
        said = attempt.recv(TOKEN_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    return "" if said.hex() == token else "another host has this address too"


def _named(interface: str, only: str) -> bool:
    """Whether GLOO_SOCKET_IFNAME's or NCCL_SOCKET_IFNAME's words mean this interface: beginnings
    of names; of NCCL's, =name is a whole name and ^name all but that one."""
    exclude, exact = only.startswith("^"), only.lstrip("^").startswith("=")
    names = [name for name in only.lstrip("^").lstrip("=").split(",") if name]
    found = any(interface == name or (not exact and interface.startswith(name)) for name in names)
    return found != exclude
