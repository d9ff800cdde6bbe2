"""Send and fetch the shards of a dataset over TCP connections between two nodes.

A request is a token of 32 bytes and a shard number (_REQUEST). The answer is the size of the file
in bytes (_SIZE), then the file. The text "address port token" identifies the server of a node: it
is ``ShardServer.name``, and the argument ``host`` of the functions. Received shards are verified
with their checksum.
"""

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from crc32c import crc32c

from ...security.files import write_all
from ...security.folders import Folder
from ...security.handshake import Acceptor, Handshake, HandshakeError, HandshakeStep
from ..format.meta_schema import Shard
from ..format.shard_format import DataError

ANSWER_TIMEOUT_S = 20.0  # for the answer of a node, and for each piece of a shard
ALIVE_TIMEOUT_S = 5.0  # for the answer of a node that is asked whether it is alive
ACCEPT_INTERVAL_S = 60.0  # longest wait in one call of the acceptor
RETRIES_S = (0.05, 0.1, 0.2)  # pauses before retries, after a node has closed the connection
PIECE_BYTES = 256 << 10
MAX_SENDERS = 64  # threads that send shards
MAX_WAITING = 1024  # authenticated connections that wait for a sender thread
ALIVE = 0xFFFFFFFF  # requested instead of a shard number, to check that the node is alive
NOT_AVAILABLE = (1 << 64) - 1  # answered instead of a size: the server does not have the shard
NO_CHECKSUM = -1  # of the index and names files of datasets that an older Paceline packed
_REQUEST, _SIZE = struct.Struct("!32sI"), struct.Struct("!Q")


class ShardServer:
    """Server that sends complete shards of a folder to clients that know its token.

    One thread accepts connections and checks the token; at most MAX_SENDERS other threads send
    shards to the authenticated clients.

    Args:
        address: IP address to listen on.
        folder: Folder with the shards; None if this node has none, and only answers ``is_alive``.
        shards: All shards of the dataset, in the order of their numbers.

    Attributes:
        name: "address port token", with which clients request shards.
    """

    def __init__(self, address: str, folder: Folder | None, shards: Sequence[Shard]) -> None:
        self._folder, self._shards = folder, shards
        self._token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family, backlog=1024)
        self.name = f"{address} {self._listening.getsockname()[1]} {self._token}"
        self._acceptor = Acceptor([self._listening], lambda _: self.handshake())
        self._lock = threading.Lock()
        self._waiting: deque[tuple[socket.socket, int]] = deque()
        self._senders = 0
        threading.Thread(target=self._serve, name="paceline-stage", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections. Shards that are being sent are completed."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # the thread then closes the socket and ends

    def handshake(self) -> Handshake[int]:
        """Read the token and the number of the requested shard."""
        token, number = _REQUEST.unpack((yield HandshakeStep(read=_REQUEST.size)))
        if not hmac.compare_digest(token, self._token.encode()):
            raise HandshakeError("the client has sent another token")
        return int(number)

    def _serve(self) -> None:
        with self._acceptor, contextlib.suppress(OSError):  # after the socket was shut down
            while True:
                for client, number in self._acceptor.wait(ACCEPT_INTERVAL_S):
                    self._admit(client, number)

    def _admit(self, client: socket.socket, number: int) -> None:
        """Queue a request for a sender thread, or answer that the shard is not available."""
        if number == ALIVE or number >= len(self._shards) or self._folder is None:
            with client, contextlib.suppress(OSError):
                client.send(_SIZE.pack(NOT_AVAILABLE))
            return
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                client.close()
                return
            self._waiting.append((client, number))
            if self._senders >= MAX_SENDERS:
                return
            self._senders += 1
        try:
            threading.Thread(target=self._send_waiting, daemon=True).start()
        except RuntimeError:  # the user's thread limit: a running sender serves the client
            with self._lock:
                self._senders -= 1

    def _send_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._senders -= 1
                    return
                client, number = self._waiting.popleft()
            with client, contextlib.suppress(OSError):  # the client then requests it elsewhere
                self._send(client, self._shards[number])

    def _send(self, client: socket.socket, shard: Shard) -> None:
        assert self._folder is not None
        client.settimeout(ANSWER_TIMEOUT_S)
        with open(self._folder.open_file(shard.file), "rb") as file:
            client.sendall(_SIZE.pack(os.fstat(file.fileno()).st_size))
            client.sendfile(file)


def is_alive(host: str) -> bool:
    """Return whether the server ``host`` answers."""
    try:
        channel, size = _request(host, ALIVE, ALIVE_TIMEOUT_S)
        channel.close()
        return size == NOT_AVAILABLE
    except (OSError, EOFError):
        return False


def _request(host: str, number: int, seconds: float) -> tuple[socket.socket, int]:
    """Request a shard from a host, and retry if it closes the connection.

    A server under load from unauthenticated connections may close any connection. After a timeout
    the request is not repeated.

    Returns:
        The connection, and the size of the shard in bytes or NOT_AVAILABLE.

    Raises:
        OSError, EOFError: The host does not answer.
    """
    pauses = iter(RETRIES_S)
    while True:
        channel = _send_request(host, number, seconds)
        try:
            return channel, _receive_size(channel, seconds)
        except (OSError, EOFError) as error:
            channel.close()
            pause = next(pauses, None)
            if pause is None or isinstance(error, TimeoutError):
                raise
        time.sleep(pause)


def _send_request(host: str, number: int, seconds: float) -> socket.socket:
    address, port, token = host.split()
    channel = socket.create_connection((address, int(port)), seconds)
    try:
        channel.sendall(_REQUEST.pack(token.encode(), number))
    except BaseException:
        channel.close()
        raise
    return channel


def fetch_shard(host: str, number: int, shard: Shard, file: BinaryIO) -> None:
    """Fetch a shard from a host into ``file``, and verify its checksum.

    Args:
        host: ``ShardServer.name`` of the host.
        number: Number of the shard in the dataset.
        shard: Expected size and checksum.

    Raises:
        OSError: The host does not send the whole shard.
        DataError: The checksum differs.
    """
    crc, left, buffer = 0, shard.bytes, memoryview(bytearray(PIECE_BYTES))
    try:
        channel, size = _request(host, number, ANSWER_TIMEOUT_S)
        with channel:
            if size != shard.bytes:
                raise ConnectionError(f"{host.split()[0]} has no complete copy of the shard")
            while left:
                piece = buffer[: min(left, PIECE_BYTES)]
                _receive_into(channel, piece, ANSWER_TIMEOUT_S)
                crc, left = crc32c(piece, crc), left - len(piece)
                write_all(file.fileno(), piece)
    except EOFError:
        raise ConnectionError(f"{host.split()[0]} closed the connection") from None
    if shard.crc not in (crc, NO_CHECKSUM):
        raise DataError(Path(shard.file), -1, 0, "arrived with another checksum")


def _receive_size(channel: socket.socket, seconds: float) -> int:
    answer = memoryview(bytearray(_SIZE.size))
    _receive_into(channel, answer, seconds)
    return int(_SIZE.unpack(answer)[0])


def _receive_into(channel: socket.socket, piece: memoryview, seconds: float) -> None:
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
