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
    told         counter: nodes that have finished
    told/K       result of the K-th of them

A node is written as "address port token": the address by which it reaches the store, the port on
which it listens, and the token that a request must contain. Received shards are verified with their
checksum, like shards that were read.
"""

import contextlib
import hmac
import json
import os
import random
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from crc32c import crc32c

from ...security.folders import Folder
from ...security.greeting import Acceptor, Greeting, RefusedError, Step
from ..format.shard_format import DataError, Shard

PREFIX = "paceline-stage"
PATIENCE_S = 20.0  # time-out for the answer of a host, and for each piece of a shard
ALIVE_S = 5.0  # time-out for the answer of a host that is asked whether it is alive
DEAD_PEER_S = 3.0  # without progress, before the hosts that read the missing shards are checked
LOOK_S = 0.05  # polling interval of the log
JOIN_S = 60.0
READY_S = 3.0  # wait for the lists of shards that other hosts have, so as not to read these again
RETRIES_S = (0.05, 0.1, 0.2)  # pauses before retries, after a host has closed the connection
PIECE = 256 << 10
MAX_SENDERS = 64  # threads that send shards
MAX_WAITING = 1024  # authenticated connections that wait for a sender thread
ALIVE = 0xFFFFFFFF  # requested instead of a shard number, to check that the host is alive
NOT_THERE = (1 << 64) - 1
UNCHECKED = -1  # no checksum: the index and names files of datasets that an older Paceline packed
_WORD, _SIZE = struct.Struct("!32sI"), struct.Struct("!Q")


class GoneError(Exception):
    """The store does not answer: the job ends, or its first node is lost."""


class Exchange:
    """One node's part in the transfer. All methods are thread-safe."""

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
        self._server = Server(address, folder, shards)
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
        with self._asked():
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
        return number not in self._had and self._takes(number, "")

    def _takes(self, number: int, before: str) -> bool:
        """Replace ``before`` as the reader of a shard, if it still is; return the success."""
        now = self._store.compare_set(f"by/{number}", before, self._own).decode()
        if now == self._own:
            self._had.add(number)
        return bool(now == self._own)

    def give_up(self, number: int) -> None:
        """Release a shard that this node could not read or store: another node may try."""
        with self._asked():
            self._store.compare_set(f"by/{number}", self._own, "")
            entry = int(self._store.add("up", 1)) - 1
            self._store.set(f"up/{entry}", str(number))

    def take_over(self, number: int) -> bool:
        """Claim a shard whose reader is lost, and return whether this node is to read it."""
        with self._asked():
            key = f"by/{number}"
            by = self._store.get(key).decode() if self._store.check([key]) else ""
        if by == self._own or (by and alive(by)):
            return False
        with self._asked():
            return self._takes(number, by)

    def tell(self, number: int) -> None:
        """Publish that a shard is complete on this node."""
        with self._asked():
            entry = int(self._store.add("there", 1)) - 1
            self._store.set(f"there/{entry}", f"{number} {self._own}")

    def ready(self, step: Callable[[], None]) -> None:
        """Publish that this node has listed its shards; wait up to READY_S for the other nodes."""
        end = time.monotonic() + READY_S
        with self._asked():
            count = int(self._store.add("ready", 1))
        while count < self.hosts and time.monotonic() < end:
            step()
            time.sleep(LOOK_S)
            with self._asked():
                count = int(self._store.add("ready", 0))
        self.news()

    def news(self) -> bool:
        """Read new entries of the log of complete shards, and return whether there were any."""
        with self._asked():
            before, count = self._seen, int(self._store.add("there", 0))
            while self._seen < count and self._store.check([f"there/{self._seen}"]):
                said = self._store.get(f"there/{self._seen}").decode()
                number, _, host = said.partition(" ")
                if host != self._own:
                    self._where.setdefault(int(number), set()).add(host)
                self._seen += 1
            return self._seen > before

    def has(self, number: int) -> bool:
        """Whether another node has a shard."""
        return bool(self._where.get(number))

    def chosen(self, numbers: Sequence[int]) -> int:
        """Choose one number at random, so that not all nodes fetch the same shard from one node."""
        return random.choice(numbers)

    def fetch(self, number: int, file: BinaryIO) -> bool:
        """Write a shard to ``file`` from a node that has it; return False if none sent it."""
        while hosts := list(self._where.get(number, ())):
            host = random.choice(hosts)
            try:
                _fetched(host, number, self._shards[number], file)
                return True
            except (OSError, DataError):
                self._where[number].discard(host)
                file.seek(0)
                file.truncate()
        return False

    def end(self, told: Mapping[str, Any]) -> None:
        """Publish the result of this node, once, so that the other nodes do not wait for it."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(GoneError), self._asked():
            place = int(self._store.add("told", 1)) - 1
            self._store.set(f"told/{place}", json.dumps(dict(told)))

    def all_told(self) -> list[dict[str, Any]]:
        """Return the results of the nodes that have finished."""
        with self._asked():
            keys = [f"told/{place}" for place in range(int(self._store.add("told", 0)))]
            return [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]

    def linger(self, step: Callable[[], None]) -> list[dict[str, Any]]:
        """Serve until all nodes have finished, and return their results.

        Args:
            step: Called periodically; it may raise.
        """
        try:
            while len(told := self.all_told()) < self.hosts:
                step()
                time.sleep(4 * LOOK_S)
        except GoneError:
            return []
        return told

    def close(self) -> None:
        self._server.close()

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except RuntimeError as error:  # DistError and its subclasses
                raise GoneError from error


def join(
    name: str, folder: Folder | None, shards: Sequence[Shard], environ: Mapping[str, str]
) -> Exchange | None:
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

    wait = timedelta(seconds=JOIN_S)
    try:
        store = TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=wait)
    except RuntimeError as error:
        raise GoneError(str(error)) from error
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    under = PrefixStore(f"{PREFIX}/{attempt}/{name}", store)
    return Exchange(under, own_address(address, int(port)), folder, shards, hosts)


def own_address(address: str, port: int) -> str:
    """Return this node's address on the route to another one. Nothing is sent."""
    family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as one:
        one.connect(where)
        return str(one.getsockname()[0])


class Server:
    """Server that sends complete shards of a folder to clients that know its token.

    One thread accepts connections and checks the token; at most MAX_SENDERS other threads send
    shards to the authenticated clients.
    """

    def __init__(self, address: str, folder: Folder | None, shards: Sequence[Shard]) -> None:
        self._folder, self._shards = folder, shards
        self._token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family, backlog=1024)
        self.name = f"{address} {self._listening.getsockname()[1]} {self._token}"
        self._acceptor = Acceptor([self._listening], lambda _: self.greeting())
        self._lock = threading.Lock()
        self._waiting: deque[tuple[socket.socket, int]] = deque()
        self._senders = 0
        threading.Thread(target=self._serve, name="paceline-stage", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends the thread, which closes it

    def greeting(self) -> Greeting[int]:
        """Read the token and the number of the requested shard."""
        token, number = _WORD.unpack((yield Step(read=_WORD.size)))
        if not hmac.compare_digest(token, self._token.encode()):
            raise RefusedError("the visitor does not know the token")
        return int(number)

    def _serve(self) -> None:
        with self._acceptor, contextlib.suppress(OSError):  # after the socket was shut down
            while True:
                for visitor, number in self._acceptor.wait(JOIN_S):
                    self._admit(visitor, number)

    def _admit(self, visitor: socket.socket, number: int) -> None:
        if number == ALIVE or number >= len(self._shards) or self._folder is None:
            with visitor, contextlib.suppress(OSError):
                visitor.send(_SIZE.pack(NOT_THERE))
            return
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                visitor.close()
                return
            self._waiting.append((visitor, number))
            if self._senders >= MAX_SENDERS:
                return
            self._senders += 1
        try:
            threading.Thread(target=self._send_in_turn, daemon=True).start()
        except RuntimeError:  # this user's thread limit is reached: a running sender may send it
            with self._lock:
                self._senders -= 1

    def _send_in_turn(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._senders -= 1
                    return
                visitor, number = self._waiting.popleft()
            with visitor, contextlib.suppress(OSError):  # the client then asks another host
                self._send(visitor, self._shards[number])

    def _send(self, visitor: socket.socket, shard: Shard) -> None:
        assert self._folder is not None
        visitor.settimeout(PATIENCE_S)
        with _opened(self._folder, shard.file) as file:
            visitor.sendall(_SIZE.pack(os.fstat(file.fileno()).st_size))
            visitor.sendfile(file)


def _opened(folder: Folder, name: str) -> BinaryIO:
    return open(folder.open_file(name), "rb")


def alive(host: str) -> bool:
    """Whether the process of a host answers."""
    try:
        channel, size = _answered(host, ALIVE, ALIVE_S)
        channel.close()
        return size == NOT_THERE
    except (OSError, EOFError):
        return False


def _answered(host: str, number: int, seconds: float) -> tuple[socket.socket, int]:
    """Request a shard from a host, and retry if it closes the connection.

    The host may be busy with connections from strangers. Return the connection and the size in
    bytes that the host reports. Raises OSError or EOFError if it does not answer.
    """
    pauses = iter(RETRIES_S)
    while True:
        channel = _asked(host, number, seconds)
        try:
            return channel, _size_from(channel, seconds)
        except (OSError, EOFError) as error:
            channel.close()
            pause = next(pauses, None)
            if pause is None or isinstance(error, TimeoutError):
                raise
        time.sleep(pause)


def _asked(host: str, number: int, patience: float) -> socket.socket:
    address, port, token = host.split()
    channel = socket.create_connection((address, int(port)), patience)
    try:
        channel.sendall(_WORD.pack(token.encode(), number))
    except BaseException:
        channel.close()
        raise
    return channel


def _fetched(host: str, number: int, shard: Shard, file: BinaryIO) -> None:
    """Fetch a shard from a host into ``file``.

    Raises:
        OSError: The host does not send the whole shard.
        DataError: The checksum differs.
    """
    crc, left, buffer = 0, shard.bytes, memoryview(bytearray(PIECE))
    try:
        channel, size = _answered(host, number, PATIENCE_S)
        with channel:
            if size != shard.bytes:
                raise ConnectionError(f"{host.split()[0]} has it not whole")
            while left:
                piece = buffer[: min(left, PIECE)]
                _fill(channel, piece, PATIENCE_S)
                crc, left = crc32c(piece, crc), left - len(piece)
                _put(file, piece)
    except EOFError:
        raise ConnectionError(f"{host.split()[0]} broke off") from None
    if shard.crc not in (crc, UNCHECKED):
        raise DataError(Path(shard.file), -1, 0, "came with another checksum")


def _put(file: BinaryIO, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        done += file.write(piece[done:])


def _size_from(channel: socket.socket, seconds: float) -> int:
    answer = memoryview(bytearray(_SIZE.size))
    _fill(channel, answer, seconds)
    return int(_SIZE.unpack(answer)[0])


def _fill(channel: socket.socket, piece: memoryview, seconds: float) -> None:
    """Receive a whole piece.

    Raises:
        TimeoutError: The piece is not complete within ``seconds``, even if bytes still arrive.
        EOFError: The connection was closed.
    """
    deadline, done = time.monotonic() + seconds, 0
    while done < len(piece):
        channel.settimeout(max(0.001, deadline - time.monotonic()))
        got = channel.recv_into(piece[done:])
        if not got:
            raise EOFError
        done += got
