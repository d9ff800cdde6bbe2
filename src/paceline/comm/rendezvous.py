"""Rendezvous of ranks without MASTER_ADDR: under srun, mpirun, mpiexec, jsrun and flux.

The name of rank 0's host is known from the launcher's environment variables, or its addresses are
sent through PMI (``Pmi``). Rank 0 listens on the first free one of a few ports that are derived
from the job's key. The other ranks connect to these ports until rank 0 answers with the address of
the store. The store is bound to the one address at which the other ranks have reached rank 0.
"""

import datetime
import hashlib
import ipaddress
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ..cluster.topology.network_interfaces import network_links
from ..plurals import named_ranks
from ..security.handshake import (
    DROPPED_CONNECTION_ERRORS,
    Acceptor,
    Handshake,
    HandshakeError,
    HandshakeStep,
    HandshakeTimeoutError,
    run_handshake,
)
from ..security.schema import parse_json
from .reachable_address import (
    Listener,
    choose,
    listen_on,
    others_of,
    requested_interface,
    try_all,
    variables,
)

# Choice of the network interface of gloo and NCCL, by connections that are tried beforehand.
#
# By default, gloo uses the address that its host's name resolves to. If this address is in
# another network than those of the other hosts, ranks wait for each other until the timeout.
# Therefore one rank of each host tries to connect to the other hosts (comm.reachable_address) as
# soon as all ranks have started. All ranks get the result, or the error, through the store.


def agree_on_interface(store: Any, rank: int, size: int, timeout: float) -> str:
    """Set those environment variables of network interfaces that are not set yet.

    Return the chosen interface and address, for messages; empty on a single host.

    Args:
        store: Store of all ranks, with a prefix that nothing else uses.
        timeout: Seconds to wait for ranks that have not started yet.

    Raises:
        ValueError: Some hosts cannot reach each other, or ranks are missing after ``timeout``. It
            is raised on all ranks, and the message says what was tried.
    """
    host = socket.gethostname()
    listener = None
    me = -1
    if store.add(f"at/{host}", 1) == 1:  # this is the first rank of its host
        me = store.add("hosts", 1) - 1
        listener = Listener(requested_interface())
        store.set(f"offer/{me}", json.dumps({"host": host, **listener.offer()}))
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
    store.set(f"here/{rank}", "")
    if store.add("ranks", 1) == size:
        store.set("all", "here")
    try:
        _wait(store, "all", size, timeout, say=rank == 0)
        if me >= 0 and listener is not None:
            _try(store, me, timeout)
        verdict = json.loads(_get(store, "verdict", timeout))
    finally:
        if listener is not None:
            listener.close()
    if "mistake" in verdict:
        raise ValueError(f"paceline.init: {verdict['mistake']}")
    if not verdict["chosen"]:
        return ""
    interface, address = verdict["chosen"][host]
    for name, value in variables(interface).items():
        os.environ.setdefault(name, value)
    return f"{interface} {address}"


def _try(store: Any, me: int, timeout: float) -> None:
    """Try to reach other hosts from this one; on the first host, also publish the result."""
    hosts = store.add("hosts", 0)
    if hosts == 1:
        store.set("verdict", json.dumps({"chosen": {}}))
        return
    offers = {other: _offer(store, other, timeout) for other in others_of(me, hosts)}
    store.set(f"tried/{me}", json.dumps(try_all(offers)))
    if me != 0:
        return
    all_offers = [_offer(store, host, timeout) for host in range(hosts)]
    tried = {
        host: {int(k): v for k, v in json.loads(_get(store, f"tried/{host}", timeout)).items()}
        for host in range(hosts)
    }
    names = [offer["host"] for offer in all_offers]
    try:
        chosen = dict(zip(names, choose(names, all_offers, tried), strict=True))
        store.set("verdict", json.dumps({"chosen": chosen}))
    except ValueError as mistake:
        store.set("verdict", json.dumps({"mistake": str(mistake)}))


def _offer(store: Any, host: int, timeout: float) -> dict[str, Any]:
    offer: dict[str, Any] = json.loads(_get(store, f"offer/{host}", timeout))
    return offer


def _get(store: Any, key: str, timeout: float) -> bytes:
    store.wait([key], datetime.timedelta(seconds=timeout))
    data: bytes = store.get(key)
    return data


def _wait(store: Any, key: str, size: int, timeout: float, say: bool) -> None:
    """Wait until all ranks have started; with ``say``, print the missing ones every 10 s."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait([key], datetime.timedelta(seconds=max(0.1, min(left, NOTICE_INTERVAL_S))))
            return
        except RuntimeError:
            started = {rank for rank in range(size) if store.check([f"here/{rank}"])}
            absent = named_ranks(set(range(size)) - started)
            if left < NOTICE_INTERVAL_S:
                raise ValueError(
                    f"paceline.init: {absent} did not join within {timeout:.0f} s. HINT: check "
                    "that all ranks run; paceline.init(timeout=SECONDS) waits longer"
                ) from None
            if say:
                sys.stderr.write(f"paceline: waiting for {absent} ...\n")


def _answer(listener: Listener) -> None:
    """Send the token to every connecting process, until the listener is closed."""
    import selectors

    selector = selectors.DefaultSelector()
    for listening in listener.sockets.values():
        selector.register(listening, selectors.EVENT_READ, listening)
    while listener.sockets:
        for key, _ in selector.select(0.2):
            listener.answer(key.data)
    selector.close()


PORTS = 8  # tried in order: another program may use the first
FIRST_PORT, LAST_PORT = 10_000, 32_000  # below the kernel's ephemeral ports
UNREACHABLE_TIMEOUT_S = 12.0  # without any answer, rank 0's host is considered unreachable
CONNECT_TIMEOUT_S = 2.0
NOTICE_INTERVAL_S = 10.0
NOT_RANK_0 = "not rank 0"
MAX_LINE_BYTES = 4096
# Connections that claim the same rank: any process that knows the job can open some.
MAX_WAITING_PER_RANK = 4


# Client of PMI, a small key-value store of MPICH's and Intel MPI's mpiexec, and of Flux.
#
# The protocol is lines of text over the file descriptor in PMI_FD. This is version 1 of PMI's
# wire protocol (Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for
# Extreme-Scale Systems", EuroMPI 2010; MPICH's simple_pmi.c). It implements only what a
# rendezvous needs: one value from rank 0 to all ranks.

READ_BYTES = 1024  # bytes per read


class Pmi:
    """This process's PMI connection.

    Raises:
        ValueError: The launcher does not answer in version 1 of the protocol.
    """

    def __init__(self, environment: Mapping[str, str], timeout: float = 600.0) -> None:
        self._fd = int(environment["PMI_FD"])
        self._timeout = timeout
        self._buffer = b""
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._name = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        """Store a value, which must not contain blanks."""
        self._ask(f"put kvsname={self._name} key={key} value={value}", "put_result")

    def barrier(self) -> None:
        """Wait for all ranks. Values that were put before are visible to all ranks afterwards."""
        self._ask("barrier_in", "barrier_out")

    def get(self, key: str) -> str:
        return self._ask(f"get kvsname={self._name} key={key}", "get_result")["value"]

    def finalize(self) -> None:
        """End the connection. Without this, mpiexec treats the end of the process as a crash."""
        self._ask("finalize", "finalize_ack")

    def _ask(self, command: str, expected: str) -> dict[str, str]:
        try:
            os.write(self._fd, f"cmd={command}\n".encode())
            answer = dict(word.partition("=")[::2] for word in self._line().split())
        except OSError as error:
            raise ValueError(f"PMI_FD={self._fd}: {error.strerror}") from None
        if answer.get("cmd") != expected or answer.get("rc", "0") != "0":
            raise ValueError(
                f"PMI_FD={self._fd}: the launcher answered {command.split()[0]} with {answer}"
            )
        return answer

    def _line(self) -> str:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poll.poll(self._timeout * 1000):
                raise ValueError(
                    f"PMI_FD={self._fd}: the launcher has not answered for {self._timeout:.0f} s. "
                    "HINT: call paceline.init() on all ranks"
                )
            data = os.read(self._fd, READ_BYTES)
            if not data:
                raise ValueError(f"PMI_FD={self._fd}: the launcher has closed the connection")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")


def from_rank_0(
    environment: Mapping[str, str], rank: int, key: str, value: str, timeout: float = 600.0
) -> str:
    """Return rank 0's ``value`` on all ranks.

    Raises:
        ValueError: Some ranks have not called this function within ``timeout`` seconds.
    """
    pmi = Pmi(environment, timeout)
    if rank == 0:
        pmi.put(key, value)
    pmi.barrier()
    found = pmi.get(key)
    pmi.finalize()
    return found


@dataclass
class _JoinRequest:
    """The first message of a rank to rank 0."""

    tag: str
    rank: int


@dataclass
class _Answer:
    """The answer of rank 0: the store's address and port."""

    store: tuple[str, Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]]


@dataclass(frozen=True)
class RendezvousSpec:
    """The parameters of a rendezvous; equal on all ranks of a start, except ``rank``.

    Attributes:
        size: World size.
        hosts: Names or addresses of hosts that rank 0 may be on.
        key: Key that identifies this start.
        one_host: Whether all ranks are on one host.
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


def join(when: RendezvousSpec, timeout: float) -> Any:
    """Return the TCPStore of all ranks, which runs in rank 0's process.

    Args:
        timeout: Seconds to wait for ranks that have not started yet.

    Raises:
        ValueError: The rendezvous failed. The message lists what was tried, or the missing ranks.
    """
    if when.rank == 0:
        return _Rank0Server(when, timeout).store()
    address, port = _find_rank_0(when, timeout)
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


class _Rank0Server:
    """The server of the rendezvous on rank 0, which sends the store's address to each other rank.

    Attributes:
        missing: Ranks that have not connected yet.
        waiting: Connections by rank that wait for the store's address. Ranks of this host connect
            before it is known at which address the other hosts reach this one.
        where: The store's address and port, once known.
        tcp_store: The store, once created.
    """

    def __init__(self, when: RendezvousSpec, timeout: float) -> None:
        self.when = when
        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.missing = set(range(1, when.size))
        self.waiting: dict[int, list[socket.socket]] = {}
        self.where: tuple[str, int] | None = None
        self.tcp_store: Any = None

    def store(self) -> Any:
        acceptor = Acceptor(self._doors(), lambda _: self.handshake())
        begun = last_notice = time.monotonic()
        has_checked = False
        try:
            while self.missing:
                for visitor, rank in acceptor.wait(1.0):
                    self._open(visitor, rank)
                now = time.monotonic()
                if now > self.deadline:
                    raise ValueError(
                        f"paceline.init: {named_ranks(self.missing)} did not connect to rank 0 on "
                        f"{socket.gethostname()} within {self.timeout:.0f} s. HINT: check that "
                        "all ranks run and that no firewall blocks them, or set MASTER_ADDR=HOST "
                        "and MASTER_PORT=PORT"
                    )
                if now - begun > UNREACHABLE_TIMEOUT_S and self.where is None and not has_checked:
                    has_checked = True
                    self._check_reachability()
                if now - last_notice > NOTICE_INTERVAL_S:
                    last_notice = now
                    sys.stderr.write(f"paceline: waiting for {named_ranks(self.missing)} ...\n")
        finally:
            acceptor.close()
            for visitor in self._waiting():
                visitor.close()
        return self.tcp_store

    def _doors(self) -> list[socket.socket]:
        addresses = ["127.0.0.1"]
        if not self.when.one_host:
            addresses += [link.address for link in network_links()]
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
            f"{socket.gethostname()}. HINT: set MASTER_ADDR=HOST and MASTER_PORT=PORT"
        )

    def handshake(self) -> Handshake[int]:
        """Read the rank of a connecting process of this job, and identify this as rank 0."""
        knock = parse_json(
            (yield HandshakeStep(read=MAX_LINE_BYTES, line=True)), _JoinRequest, "knock"
        )
        if knock.tag != self.when.tag or not 0 < knock.rank < self.when.size:
            raise HandshakeError("the visitor belongs to another job")
        yield HandshakeStep(send=self.when.tag.encode() + b"\n")
        return knock.rank

    def _open(self, visitor: socket.socket, rank: int) -> None:
        try:
            own, other = str(visitor.getsockname()[0]), str(visitor.getpeername()[0])
        except OSError:  # reset after the handshake: the rank connects again
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
            self._send_address()

    def _settle(self, address: str) -> None:
        """Create the store, on the address at which the other ranks have connected."""
        listening = listen_on(address)
        port = listening.getsockname()[1]
        fd = listening.detach()
        self.tcp_store = _store(address, port, self.when.size, self.timeout, fd)
        self.where = (address, port)

    def _send_address(self) -> None:
        answer = json.dumps({"store": self.where}).encode() + b"\n"
        for visitor in self._waiting():
            try:
                visitor.sendall(answer)
            except OSError:
                pass  # the rank has ended; the store's timeout reports this
            visitor.close()
        self.waiting.clear()

    def _waiting(self) -> list[socket.socket]:
        return [visitor for same in self.waiting.values() for visitor in same]

    def _check_reachability(self) -> None:
        """Check whether this host reaches another one; called if no other host has connected.

        If this host reaches none either, the ranks there cannot connect.

        Raises:
            ValueError: This host reaches none of the others. The message lists what was tried.
        """
        tried: dict[str, str] = {}
        mine = {link.address for link in network_links()} | {"127.0.0.1"}
        for host in [] if self.when.one_host else self.when.hosts[:16]:
            for address in set(_addresses(host, tried)) - mine:
                answer = _request_store(self.when, address, self.when.ports[0], CONNECT_TIMEOUT_S)
                if not isinstance(answer, str) or "refused" in answer or answer == NOT_RANK_0:
                    return
                tried[f"{host} = {address}" if host != address else host] = answer
        if tried:
            lines = "".join(f"\n    {where}: {why}" for where, why in tried.items())
            raise ValueError(
                f"paceline.init: {named_ranks(self.missing)} did not connect to rank 0 on "
                f"{socket.gethostname()}, which can't reach the other hosts either:{lines}\n"
                "HINT: set MASTER_ADDR=ADDRESS and MASTER_PORT=PORT"
            )


def _find_rank_0(when: RendezvousSpec, timeout: float) -> tuple[str, int]:
    """Try all hosts and ports in order until rank 0 answers; return the store's address and port.

    Raises:
        ValueError: Rank 0 was not found in time.
    """
    begun = time.monotonic()
    hosts = ["127.0.0.1"] if when.one_host else when.hosts
    tried: dict[str, str] = {}
    alive = False  # whether any of these hosts has answered, even by refusing a connection
    while True:
        for host in hosts:
            for address in _addresses(host, tried):
                for port in when.ports:
                    left = begun + timeout - time.monotonic()
                    answer = _request_store(when, address, port, left)
                    if isinstance(answer, tuple):
                        return answer
                    tried[f"{host} = {address}" if host != address else host] = answer
                    if "refused" in answer or answer == NOT_RANK_0:
                        alive = True
                    else:
                        break  # a host that does not answer on one port does not answer on others
        waited = time.monotonic() - begun
        if waited > (timeout if alive else min(UNREACHABLE_TIMEOUT_S, timeout)):
            lines = "".join(f"\n    {where}: {why}" for where, why in tried.items())
            raise ValueError(
                f"paceline.init: rank {when.rank} on {socket.gethostname()} did not find rank 0 in "
                f"{waited:.0f} s. Tried ports {when.ports[0]} to {when.ports[-1]} of:{lines}\n"
                "HINT: check that rank 0 runs and that this node can reach it, or set "
                "MASTER_ADDR=ADDRESS and MASTER_PORT=PORT"
            )
        time.sleep(0.05)


def _addresses(host: str, tried: dict[str, str]) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        tried[host] = f"the name can't be resolved ({error.strerror})"
        return []
    addresses = []
    for entry in found:
        address = ipaddress.ip_address(str(entry[4][0]).partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        # Debian resolves a host's own name to 127.0.1.1; rank 0 listens on 127.0.0.1.
        own = str(address) == "127.0.1.1"
        addresses.append("127.0.0.1" if own else str(address))
    return list(dict.fromkeys(addresses))


def _request_store(
    when: RendezvousSpec, address: str, port: int, left: float
) -> tuple[str, int] | str:
    """Return the store's address and port, or the reason why there is no answer."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as door:
            try:
                run_handshake(door, request_handshake(when), CONNECT_TIMEOUT_S)
            except HandshakeTimeoutError:
                return NOT_RANK_0  # rank 0 would have answered
            return run_handshake(door, store_handshake(), max(0.1, left))
    except TimeoutError:
        return f"no answer in {CONNECT_TIMEOUT_S:.0f} s"
    except (*DROPPED_CONNECTION_ERRORS, ValueError):
        return NOT_RANK_0  # or it is busy with other connections; the caller tries again
    except OSError as error:
        return (error.strerror or str(error)).lower()


def request_handshake(when: RendezvousSpec) -> Handshake[None]:
    """Identify this rank to rank 0.

    Raises:
        HandshakeError: The other side is not rank 0 of the same job.
    """
    knock = json.dumps({"tag": when.tag, "rank": when.rank}).encode() + b"\n"
    answer = yield HandshakeStep(send=knock, read=MAX_LINE_BYTES, line=True)
    if answer.strip() != when.tag.encode():
        raise HandshakeError(NOT_RANK_0)


def store_handshake() -> Handshake[tuple[str, int]]:
    """Read the store's address, which rank 0 sends once it knows where it can be reached."""
    answer = yield HandshakeStep(read=MAX_LINE_BYTES, line=True)
    address, port = parse_json(answer, _Answer, "rank 0's answer").store
    return str(ipaddress.ip_address(address)), port
