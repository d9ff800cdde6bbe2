"""Exchange messages between Paceline's own processes on different nodes.

A message is a JSON object, plus raw bytes if it carries output or a file. Over ssh the channel is
the remote command's standard input and output, and ssh has authenticated both sides. Over TCP both
sides first prove that they know the job's secret, without sending it; afterwards each message
carries a keyed hash (HMAC-SHA256 over a counter and the message), so that no other process can
insert messages. Nothing is encrypted, and nothing is unpickled. See docs/explanation/security.md.
"""

import contextlib
import hashlib
import hmac
import json
import os
import random
import secrets
import select
import socket
import struct
import time
from typing import Any

from ..security.files import InvalidFileError, write_all
from ..security.handshake import (
    DROPPED_CONNECTION_ERRORS,
    Handshake,
    HandshakeError,
    HandshakeStep,
    run_handshake,
)
from ..security.schema import load_json
from .linux_processes import is_ready

FRAME_HEADER = struct.Struct(">II")  # bytes of JSON, raw bytes
MAX_JSON_BYTES, MAX_RAW_BYTES = 16 << 20, 16 << 20
MAC_BYTES = NONCE_BYTES = 32
HANDSHAKE_TIMEOUT_S = (
    5.0  # from a connection until both sides have proved that they know the secret
)
MAX_LOGIN_BYTES = 1 << 20  # that login scripts print before BEGIN
# Over ssh, what login scripts print comes first; the channel begins behind this line.
START_MARKER = b"\n--paceline-channel-1--\n"


class InvalidMessageError(Exception):
    """The received data is not a message: the peer is not Paceline, or the data was modified."""


class Channel:
    """Messages over two file descriptors, or one socket. Not thread-safe, except that one thread
    may send while another receives.
    """

    def __init__(
        self, read_fd: int, write_fd: int, keys: tuple[bytes, bytes] | None = None
    ) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._key = keys[0] if keys is not None else None
        self._peer_key = keys[1] if keys is not None else None
        self._sent = self._received = 0
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._read_fd

    @property
    def descriptors(self) -> set[int]:
        return {self._read_fd, self._write_fd}

    def send(self, message: dict[str, Any], raw: bytes = b"") -> None:
        """Send a message. Raises OSError if the other side is gone."""
        text = json.dumps(message).encode()
        frame = FRAME_HEADER.pack(len(text), len(raw)) + text + raw
        if self._key is not None:
            frame += _mac(self._key, b"%d" % self._sent, frame)
            self._sent += 1
        write_all(self._write_fd, frame)

    def has_room(self) -> bool:
        """Whether a short message can be sent without waiting for the reader."""
        return is_ready(self._write_fd, select.POLLOUT, 0.0)

    def receive(self) -> list[tuple[dict[str, Any], bytes]] | None:
        """Return the messages that are available once the descriptor is readable; None at the end.

        Raises:
            InvalidMessageError: The data is not a message.
        """
        messages = []
        while (message := self._next_message()) is not None:  # some came with the handshake
            messages.append(message)
        if messages:
            return messages
        try:
            data = os.read(self._read_fd, 1 << 18)
        except OSError:
            data = b""
        if not data:
            return None
        self._buffer += data
        while (message := self._next_message()) is not None:
            messages.append(message)
        return messages

    def skip_login_output(self, seconds: float) -> bytes | None:
        """Read up to ``START_MARKER``. Return what came before it; None if it did not come."""
        deadline = time.monotonic() + seconds
        while START_MARKER not in self._buffer:
            ready = is_ready(self._read_fd, select.POLLIN, deadline - time.monotonic())
            data = os.read(self._read_fd, 1 << 16) if ready else b""
            if not data or len(self._buffer) > MAX_LOGIN_BYTES:
                return None
            self._buffer += data
        before, _, rest = bytes(self._buffer).partition(START_MARKER)
        self._buffer = bytearray(rest)
        return before

    def close(self) -> None:
        """Close the channel. The peer sees the end at once, even while a thread reads here."""
        if self._read_fd == self._write_fd:
            try:
                with socket.socket(fileno=os.dup(self._read_fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for fd in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _next_message(self) -> tuple[dict[str, Any], bytes] | None:
        if len(self._buffer) < FRAME_HEADER.size:
            return None
        json_bytes, raw_bytes = FRAME_HEADER.unpack_from(self._buffer)
        if json_bytes > MAX_JSON_BYTES or raw_bytes > MAX_RAW_BYTES:
            raise InvalidMessageError(f"a message of {json_bytes + raw_bytes} bytes")
        end = FRAME_HEADER.size + json_bytes + raw_bytes
        whole = end + (MAC_BYTES if self._peer_key is not None else 0)
        if len(self._buffer) < whole:
            return None
        frame = bytes(self._buffer[:end])
        if self._peer_key is not None:
            mac = bytes(self._buffer[end:whole])
            if not hmac.compare_digest(mac, _mac(self._peer_key, b"%d" % self._received, frame)):
                raise InvalidMessageError("a message whose keyed hash is wrong")
            self._received += 1
        del self._buffer[:whole]
        try:
            message = load_json(
                frame[FRAME_HEADER.size : FRAME_HEADER.size + json_bytes], "a message"
            )
        except InvalidFileError as error:
            raise InvalidMessageError(f"a message that {error.reason}") from None
        if not isinstance(message, dict):
            raise InvalidMessageError("a message that is not a JSON object")
        return message, frame[FRAME_HEADER.size + json_bytes :]


def new_secret() -> str:
    """Return a new secret for a job: 256 random bits, as text."""
    return secrets.token_hex(32)


def host_handshake(secret: str) -> Handshake[bytes]:
    """The listening side's part of the handshake.

    Returns:
        The random numbers of both sides, from which ``channel_of_visitor`` makes the keys.

    Raises:
        HandshakeError: The visitor does not prove that it knows the secret.
    """
    ours = secrets.token_bytes(NONCE_BYTES)
    answer = yield HandshakeStep(send=ours, read=NONCE_BYTES + MAC_BYTES)
    nonces, proof = ours + answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _mac(secret.encode(), b"visitor", nonces)):
        raise HandshakeError("the visitor does not know this job's secret")
    yield HandshakeStep(send=_mac(secret.encode(), b"host", nonces))
    return nonces


def visitor_handshake(secret: str, host: str) -> Handshake[bytes]:
    """The connecting side's part of the handshake; ``host`` names the other side in errors.

    Returns:
        As ``host_handshake``.

    Raises:
        HandshakeError: The host does not prove that it knows the secret.
    """
    theirs = yield HandshakeStep(read=NONCE_BYTES)
    nonces = theirs + secrets.token_bytes(NONCE_BYTES)
    own = nonces[NONCE_BYTES:] + _mac(secret.encode(), b"visitor", nonces)
    proof = yield HandshakeStep(send=own, read=MAC_BYTES)
    if not hmac.compare_digest(proof, _mac(secret.encode(), b"host", nonces)):
        raise HandshakeError(f"{host} does not know this job's secret")
    return nonces


def channel_of_visitor(visitor: socket.socket, secret: str, nonces: bytes) -> Channel:
    """Return the listening side's channel, after ``host_handshake``. Raises OSError."""
    return _authenticated_channel(visitor, secret, nonces, b"host", b"visitor")


def connect_channel(address: str, port: int, secret: str, seconds: float) -> Channel:
    """Connect to a listener and return the channel.

    Raises:
        OSError: Nothing answers, or the peer does not know the secret.
    """
    host = socket.create_connection((address, port), timeout=seconds)
    try:
        handshake = visitor_handshake(secret, f"{address} port {port}")
        nonces = run_handshake(host, handshake, HANDSHAKE_TIMEOUT_S)
        return _authenticated_channel(host, secret, nonces, b"visitor", b"host")
    except OSError:
        host.close()
        raise


def _authenticated_channel(
    connection: socket.socket, secret: str, nonces: bytes, own: bytes, peer: bytes
) -> Channel:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    fd = connection.detach()
    key, peer_key = (_mac(secret.encode(), b"from " + side, nonces) for side in (own, peer))
    return Channel(fd, fd, (key, peer_key))


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"|".join(parts), hashlib.sha256).digest()


# Connection from an agent to its launcher, which may be busy with other connections.

CONNECT_TIMEOUT_S = 5.0  # timeout for each address of the launcher
CONNECT_PATIENCE_S = 25.0  # until the last attempt, if the launcher drops connections or is silent
REFUSED_PATIENCE_S = 1.0  # until the last attempt, if all addresses refuse the connection
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 2.0  # between attempts; doubled each time


class LauncherNotFoundError(Exception):
    """The agent could not connect to any address of the launcher.

    Attributes:
        tried: Error message, by address.
        dropped: Whether a connection was made and dropped during the handshake.
    """

    def __init__(self, tried: dict[str, str], dropped: bool) -> None:
        super().__init__("; ".join(f"{address}: {why}" for address, why in tried.items()))
        self.tried, self.dropped = tried, dropped


def connect_to_launcher(where: str, secret: str) -> Channel:
    """Connect to the launcher by one of its addresses, and retry if it drops the connection.

    Args:
        where: The addresses in the form ``ADDRESS,PORT;ADDRESS,PORT`` (``AgentListener.where``).
        secret: The job's secret.

    Raises:
        LauncherNotFoundError: No process listens on the addresses, or none that knows the secret.
    """
    begun = answered = time.monotonic()
    wait, dropped = FIRST_WAIT_S, False
    tried: dict[str, str] = {}
    while True:
        for pair in where.split(";"):
            address, _, port = pair.rpartition(",")
            try:
                return connect_channel(address, int(port), secret, CONNECT_TIMEOUT_S)
            except OSError as error:
                tried[address] = error.strerror or str(error)
                dropped = dropped or isinstance(error, DROPPED_CONNECTION_ERRORS)
                if isinstance(error, (*DROPPED_CONNECTION_ERRORS, TimeoutError)):
                    answered = time.monotonic()
        now = time.monotonic()
        if now - begun > CONNECT_PATIENCE_S or now - answered > REFUSED_PATIENCE_S:
            raise LauncherNotFoundError(tried, dropped)
        # Random, so that not all dropped agents reconnect at the same time.
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, MAX_WAIT_S)
