"""Where ranks meet that nobody has told an address: under srun, mpirun, mpiexec, jsrun, flux.

Rank 0's host is known by name from the launcher's variables, or its addresses come through PMI
(comm.pmi). Rank 0 listens on one of a few ports that follow from the job's identity, the first
that is free; the others knock there until it answers with where the store is. The store itself
is then bound to the one address by which the others have reached rank 0.
"""

import datetime
import hashlib
import ipaddress
import json
import os
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ..cluster.topology.network_interfaces import links
from ..security.greeting import (
    DROPPED,
    Acceptor,
    Greeting,
    NoAnswerError,
    RefusedError,
    Step,
    converse,
)
from ..security.schema import parse_json
from .reachable_address import listen_on

PORTS = 8  # tried in turn: another program may have the first
FIRST_PORT, LAST_PORT = 10_000, 32_000  # below those that the kernel gives to any program
UNREACHABLE_SECONDS = 12.0  # rank 0's host does not answer at all: it will not later either
KNOCK_SECONDS = 2.0
SAY_SECONDS = 10.0
NOT_RANK_0 = "not rank 0"
MAX_LINE_BYTES = 4096
MAX_WAITING_PER_RANK = 4  # connections that say the same rank: whoever knows the job can make some


@dataclass
class _Knock:
    """What a rank says first."""

    tag: str
    rank: int


@dataclass
class _Answer:
    """What rank 0 answers: the store's address and port."""

    store: tuple[str, Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]]


@dataclass(frozen=True)
class Appointment:
    """What all ranks of a start know of their meeting: the same on all, but ``rank``.

    hosts: names or addresses of where rank 0 may be. key: of this start. one_host: all ranks
    are on one.
    """

    rank: int
    size: int
    hosts: list[str]
    key: str
    one_host: bool

    @property
    def tag(self) -> str:
        return hashlib.sha256(f"paceline {os.getuid()} {self.key}".encode()).hexdigest()

    @property
    def ports(self) -> list[int]:
        start = int(self.tag[:8], 16) % (LAST_PORT - FIRST_PORT - PORTS)
        return [FIRST_PORT + start + i for i in range(PORTS)]


def meet(when: Appointment, timeout: float) -> Any:
    """The ranks' TCPStore; rank 0's process has it.

    timeout: seconds to wait for ranks that have not started yet. Raises ValueError that names
    what was tried, or which ranks did not come.
    """
    if when.rank == 0:
        return _Doorman(when, timeout).store()
    address, port = _knock(when, timeout)
    return _store(address, port, when.size, timeout)


def _store(address: str, port: int, size: int, timeout: float, listening: int | None = None) -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        address,
        port,
        world_size=size,
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout),
        master_listen_fd=listening,
    )


class _Doorman:
    """Rank 0: opens to each of the other ranks once, and tells them where the store is."""

    def __init__(self, when: Appointment, timeout: float) -> None:
        self.when = when
        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.missing = set(range(1, when.size))
        # Of this host, by rank, until the address is known.
        self.waiting: dict[int, list[socket.socket]] = {}
        self.where: tuple[str, int] | None = None
        self.made: Any = None

    def store(self) -> Any:
        acceptor = Acceptor(self._doors(), lambda _: self.greeting())
        begun = said = time.monotonic()
        asked = False
        try:
            while self.missing:
                for visitor, rank in acceptor.wait(1.0):
                    self._open(visitor, rank)
                now = time.monotonic()
                if now > self.deadline:
                    raise ValueError(
                        f"paceline.init: {self._absent()} did not come within {self.timeout:.0f} s "
                        f"to {socket.gethostname()}. HINT: are they running, and is there a "
                        "firewall? MASTER_ADDR=HOST MASTER_PORT=PORT takes an address by hand"
                    )
                if now - begun > UNREACHABLE_SECONDS and self.where is None and not asked:
                    asked = True
                    self._are_they_there()
                if now - said > SAY_SECONDS:
                    said = now
                    sys.stderr.write(f"paceline: waiting for {self._absent()} ...\n")
        finally:
            acceptor.close()
            for visitor in self._waiting():
                visitor.close()
        return self.made

    def _doors(self) -> list[socket.socket]:
        addresses = ["127.0.0.1"]
        if not self.when.one_host:
            addresses += [link.address for link in links()]
        for port in self.when.ports:
            with ExitStack() as opened:
                try:
                    doors = [opened.enter_context(listen_on(a, port)) for a in addresses]
                except OSError:
                    continue
                opened.pop_all()
                return doors
        raise ValueError(
            f"paceline.init: ports {self.when.ports[0]} to {self.when.ports[-1]} are all in use on "
            f"{socket.gethostname()}. HINT: MASTER_ADDR=HOST MASTER_PORT=PORT"
        )

    def greeting(self) -> Greeting[int]:
        """Read the rank of a visitor of this job, and say that this is rank 0."""
        knock = parse_json((yield Step(read=MAX_LINE_BYTES, line=True)), _Knock, "knock")
        if knock.tag != self.when.tag or not 0 < knock.rank < self.when.size:
            raise RefusedError("the visitor is of another job")
        yield Step(send=self.when.tag.encode() + b"\n")
        return knock.rank

    def _open(self, visitor: socket.socket, rank: int) -> None:
        try:
            own, other = str(visitor.getsockname()[0]), str(visitor.getpeername()[0])
        except OSError:  # reset after the greeting: the rank knocks again
            visitor.close()
            return
        self.missing.discard(rank)
        same = self.waiting.setdefault(rank, [])
        same.append(visitor)
        if len(same) > MAX_WAITING_PER_RANK:
            same.pop(0).close()
        outside = other != own and own != "127.0.0.1"
        if self.where is None and (outside or self.when.one_host or not self.missing):
            self._settle(own)
        if self.where is not None:
            self._tell()

    def _settle(self, address: str) -> None:
        """The store, on the address by which others have come."""
        listening = listen_on(address)
        port = listening.getsockname()[1]
        fd = listening.detach()
        self.made = _store(address, port, self.when.size, self.timeout, fd)
        self.where = (address, port)

    def _tell(self) -> None:
        answer = json.dumps({"store": self.where}).encode() + b"\n"
        for visitor in self._waiting():
            try:
                visitor.sendall(answer)
            except OSError:
                pass  # it has died; the store's timeout will say so
            visitor.close()
        self.waiting.clear()

    def _waiting(self) -> list[socket.socket]:
        return [visitor for same in self.waiting.values() for visitor in same]

    def _are_they_there(self) -> None:
        """Nobody came from elsewhere. Where this host reaches none of the others either, they
        can't come. ValueError that names what was tried."""
        tried: dict[str, str] = {}
        mine = {link.address for link in links()} | {"127.0.0.1"}
        for host in [] if self.when.one_host else self.when.hosts[:16]:
            for address in set(_addresses(host, tried)) - mine:
                answer = _ask(self.when, address, self.when.ports[0], KNOCK_SECONDS)
                if not isinstance(answer, str) or "refused" in answer or answer == NOT_RANK_0:
                    return
                tried[f"{host} = {address}" if host != address else host] = answer
        if tried:
            lines = "".join(f"\n    {where}: {why}" for where, why in tried.items())
            raise ValueError(
                f"paceline.init: {self._absent()} did not come to {socket.gethostname()}, which "
                f"does not reach the other hosts either:{lines}\nHINT: MASTER_ADDR=ADDRESS "
                "MASTER_PORT=PORT takes an address by hand"
            )

    def _absent(self) -> str:
        some = ", ".join(str(rank) for rank in sorted(self.missing)[:8])
        more = len(self.missing) - 8
        many = "s" if len(self.missing) > 1 else ""
        return f"rank{many} {some}{f' and {more} more' if more > 0 else ''}"


def _knock(when: Appointment, timeout: float) -> tuple[str, int]:
    """Every host and port in turn, until rank 0 answers."""
    begun = time.monotonic()
    hosts = ["127.0.0.1"] if when.one_host else when.hosts
    tried: dict[str, str] = {}
    alive = False  # whether any of these hosts has answered, if only to refuse
    while True:
        for host in hosts:
            for address in _addresses(host, tried):
                for port in when.ports:
                    left = begun + timeout - time.monotonic()
                    answer = _ask(when, address, port, left)
                    if isinstance(answer, tuple):
                        return answer
                    tried[f"{host} = {address}" if host != address else host] = answer
                    if "refused" in answer or answer == NOT_RANK_0:
                        alive = True
                    else:
                        break  # the other ports of a silent host are silent too
        waited = time.monotonic() - begun
        if waited > (timeout if alive else min(UNREACHABLE_SECONDS, timeout)):
            lines = "".join(f"\n    {where}: {why}" for where, why in tried.items())
            raise ValueError(
                f"paceline.init: rank {when.rank} on {socket.gethostname()} did not find rank 0 in "
                f"{waited:.0f} s. Tried ports {when.ports[0]} to {when.ports[-1]} of:{lines}\n"
                "HINT: did rank 0 start, and can this host reach it? MASTER_ADDR=ADDRESS "
                "MASTER_PORT=PORT takes an address by hand"
            )
        time.sleep(0.05)


def _addresses(host: str, tried: dict[str, str]) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        tried[host] = f"the name is not known ({error.strerror})"
        return []
    addresses = []
    for entry in found:
        address = ipaddress.ip_address(str(entry[4][0]).partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        # Debian has a host's own name at 127.0.1.1; rank 0 listens at 127.0.0.1.
        own = str(address) == "127.0.1.1"
        addresses.append("127.0.0.1" if own else str(address))
    return list(dict.fromkeys(addresses))


def _ask(when: Appointment, address: str, port: int, left: float) -> tuple[str, int] | str:
    """Where the store is, or why there is no answer."""
    try:
        with socket.create_connection((address, port), timeout=KNOCK_SECONDS) as door:
            try:
                converse(door, knocking(when), KNOCK_SECONDS)
            except NoAnswerError:
                return NOT_RANK_0  # it would have answered
            return converse(door, waiting_for_store(), max(0.1, left))
    except TimeoutError:
        return f"no answer in {KNOCK_SECONDS:.0f} s"
    except (*DROPPED, ValueError):
        return NOT_RANK_0  # or it is busy with other visitors: it is asked again
    except OSError as error:
        return (error.strerror or str(error)).lower()


def knocking(when: Appointment) -> Greeting[None]:
    """Say who we are; RefusedError where the other side is not rank 0 of the same job."""
    knock = json.dumps({"tag": when.tag, "rank": when.rank}).encode() + b"\n"
    said = yield Step(send=knock, read=MAX_LINE_BYTES, line=True)
    if said.strip() != when.tag.encode():
        raise RefusedError(NOT_RANK_0)


def waiting_for_store() -> Greeting[tuple[str, int]]:
    """Read where the store is, once rank 0 knows by which of its addresses it is reached."""
    said = yield Step(read=MAX_LINE_BYTES, line=True)
    address, port = parse_json(said, _Answer, "rank 0's answer").store
    return str(ipaddress.ip_address(address)), port
