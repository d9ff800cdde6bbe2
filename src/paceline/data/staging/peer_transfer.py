"""Transfer of shards between the nodes of a job.

Each shard is read once from the origin by the node that claims it; the other nodes fetch it from
that node.

Keys in the store of the job (torch's TCPStore), under "paceline-stage/ATTEMPT/DATASET/":

    turn         counter: the node that increments it claims the shard of that number
    by/N         node that reads shard N; "" if that node gave it up
    up           counter: length of the log of shards that were given up
    up/K         its K-th entry: number of the shard
    there        counter: length of the log of complete shards
    there/K      its K-th entry: number of the shard, and the node on which it is complete
    ready        counter: nodes that have published the shards they had before
    results      counter: nodes that have finished
    results/K    result of the K-th of them

A node is written as "address port token": the address by which it reaches the store, the port on
which it listens, and the token that a request must contain (shard_server.py).
"""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, BinaryIO

from ...security.folders import Folder
from ..format.meta_schema import Shard
from ..format.shard_format import DataError
from .shard_server import ShardServer, fetch_shard, is_alive

PREFIX = "paceline-stage"
PEER_CHECK_DELAY_S = 3.0  # without progress, before the readers of missing shards are checked
POLL_INTERVAL_S = 0.05  # polling interval of the log
JOIN_TIMEOUT_S = 60.0  # to connect to the job's store
READY_TIMEOUT_S = 3.0  # for the lists of shards that other nodes have: these are not read again


class StoreLostError(Exception):
    """The store does not answer: the job ends, or its first node is lost."""


class PeerTransfer:
    """One node's side of the shard transfer between the nodes of a job.

    Methods may be called by several threads: calls of the store are serialized, and ``_where``
    relies on the atomicity of operations on one set.

    Raises:
        StoreLostError: Every method that uses the store raises it if the store does not answer.
    """

    def __init__(
        self, store: Any, address: str, folder: Folder | None, shards: Sequence[Shard], hosts: int
    ) -> None:
        """Start to serve the shards of ``folder``.

        Args:
            store: Store of the job, with a prefix for this dataset.
            folder: Folder of the complete shards.
            hosts: Maximum number of nodes that take part.
        """
        self.hosts, self._shards, self._store = hosts, shards, store
        self._server = ShardServer(address, folder, shards)
        self._own = self._server.name
        self._lock = threading.Lock()  # the client of a store serves one call at a time
        self._where: dict[int, set[str]] = {}
        self._seen = 0
        self._had: set[int] = set()  # shards that this host has ever claimed
        self._ended = False

    def claim(self) -> int | None:
        """Return the number of a shard that only this node reads; None if all are claimed.

        Shards that other nodes have given up come last.
        """
        with self._store_call():
            while (number := int(self._store.add("turn", 1)) - 1) < len(self._shards):
                if self._is_own(number):
                    return number
            for entry in range(int(self._store.add("up", 0))):
                if self._store.check([f"up/{entry}"]):
                    number = int(self._store.get(f"up/{entry}"))
                    if self._is_own(number):
                        return number
            return None

    def _is_own(self, number: int) -> bool:
        """Claim a shard without a reader, unless this node claimed it before; return success."""
        return number not in self._had and self._take(number, "")

    def _take(self, number: int, before: str) -> bool:
        """Replace ``before`` as the reader of a shard, if it still is; return the success."""
        now = self._store.compare_set(f"by/{number}", before, self._own).decode()
        if now == self._own:
            self._had.add(number)
        return bool(now == self._own)

    def give_up(self, number: int) -> None:
        """Release a shard that this node could not read or store: another node may try."""
        with self._store_call():
            self._store.compare_set(f"by/{number}", self._own, "")
            entry = int(self._store.add("up", 1)) - 1
            self._store.set(f"up/{entry}", str(number))

    def take_over(self, number: int) -> bool:
        """Claim a shard whose reader is lost, and return whether this node is to read it."""
        with self._store_call():
            key = f"by/{number}"
            by = self._store.get(key).decode() if self._store.check([key]) else ""
        if by == self._own or (by and is_alive(by)):
            return False
        with self._store_call():
            return self._take(number, by)

    def publish(self, number: int) -> None:
        """Publish that a shard is complete on this node."""
        with self._store_call():
            entry = int(self._store.add("there", 1)) - 1
            self._store.set(f"there/{entry}", f"{number} {self._own}")

    def ready(self, step: Callable[[], None]) -> None:
        """Publish that this node has listed its shards; wait READY_TIMEOUT_S for other nodes."""
        end = time.monotonic() + READY_TIMEOUT_S
        with self._store_call():
            count = int(self._store.add("ready", 1))
        while count < self.hosts and time.monotonic() < end:
            step()
            time.sleep(POLL_INTERVAL_S)
            with self._store_call():
                count = int(self._store.add("ready", 0))
        self.read_log()

    def read_log(self) -> bool:
        """Read new entries of the log of complete shards, and return whether there were any."""
        with self._store_call():
            before, count = self._seen, int(self._store.add("there", 0))
            while self._seen < count and self._store.check([f"there/{self._seen}"]):
                entry = self._store.get(f"there/{self._seen}").decode()
                number, _, host = entry.partition(" ")
                if host != self._own:
                    self._where.setdefault(int(number), set()).add(host)
                self._seen += 1
            return self._seen > before

    def has(self, number: int) -> bool:
        """Whether another node has a shard."""
        return bool(self._where.get(number))

    def fetch(self, number: int, file: BinaryIO) -> bool:
        """Write a shard to ``file`` from a node that has it; return False if none sent it."""
        while hosts := list(self._where.get(number, ())):
            host = random.choice(hosts)
            try:
                fetch_shard(host, number, self._shards[number], file)
                return True
            except (OSError, DataError):
                self._where[number].discard(host)
                file.seek(0)
                file.truncate()
        return False

    def end(self, result: Mapping[str, Any]) -> None:
        """Publish the result of this node, once, so that the other nodes do not wait for it."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(StoreLostError), self._store_call():
            place = int(self._store.add("results", 1)) - 1
            self._store.set(f"results/{place}", json.dumps(dict(result)))

    def all_results(self) -> list[dict[str, Any]]:
        """Return the results of the nodes that have finished."""
        with self._store_call():
            keys = [f"results/{place}" for place in range(int(self._store.add("results", 0)))]
            return [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]

    def linger(self, step: Callable[[], None]) -> list[dict[str, Any]]:
        """Serve until all nodes have finished, and return their results.

        Args:
            step: Called periodically; it may raise.
        """
        try:
            while len(results := self.all_results()) < self.hosts:
                step()
                time.sleep(4 * POLL_INTERVAL_S)
        except StoreLostError:
            return []
        return results

    def close(self) -> None:
        self._server.close()

    @contextlib.contextmanager
    def _store_call(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except RuntimeError as error:  # DistError and its subclasses
                raise StoreLostError from error


def join_peer_transfer(
    name: str, folder: Folder | None, shards: Sequence[Shard], environ: Mapping[str, str]
) -> PeerTransfer | None:
    """Join the exchange of the job that torchrun's environment variables describe.

    Args:
        name: Name of the dataset, the same on all nodes.
        folder: Folder of the dataset; None if this node has none.

    Returns:
        None if the job has no other node or no store.

    Raises:
        GoneError: The store does not answer.
    """
    hosts = int(environ.get("GROUP_WORLD_SIZE") or 1)
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if hosts < 2 or not address or not port:
        return None
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    wait = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        store = TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=wait)
    except RuntimeError as error:
        raise StoreLostError(str(error)) from error
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    under = PrefixStore(f"{PREFIX}/{attempt}/{name}", store)
    return PeerTransfer(under, own_address(address, int(port)), folder, shards, hosts)


def own_address(address: str, port: int) -> str:
    """Return this node's address on the route to another one. Nothing is sent."""
    family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unsent:
        unsent.connect(where)
        return str(unsent.getsockname()[0])
