"""Both sides of each handshake, with arbitrary bytes.

Handshakes are between the launcher and its agents, between ranks that meet, between peers on other
nodes, and with nodes that request shards.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from paceline.comm.hosts import connect
from paceline.comm.rendezvous import (
    RendezvousSpec,
    _Rank0Server,
    request_handshake,
    store_handshake,
)
from paceline.data.staging import shard_server
from paceline.launch import channel
from paceline.security.handshake import Handshake, HandshakeRun

SECRET, NONCE, TOKEN = "s" * 64, bytes(range(32)), "0123456789abcdef" * 2
WHEN = RendezvousSpec(1, 4, ["host1"], "key", False)
PIECES = (1, 3, 32, 4096)


class _Fixed:
    """Replace the module ``secrets``, so that inputs can contain a valid proof."""

    token_bytes = staticmethod(lambda count: NONCE[:count])


channel.secrets = _Fixed  # type: ignore[assignment, unused-ignore]


def _with_token(kind: Any) -> Any:
    made = kind.__new__(kind)
    made._token = TOKEN
    return made


HANDSHAKES: list[Callable[[], Handshake[Any]]] = [
    lambda: channel.host_handshake(SECRET),
    lambda: channel.visitor_handshake(SECRET, "host1 port 1"),
    _Rank0Server(WHEN, 1.0).handshake,
    lambda: request_handshake(WHEN),
    store_handshake,
    _with_token(shard_server.ShardServer).handshake,
    _with_token(connect.PeerListener)._handshake,
    lambda: connect.introduction(TOKEN, 3),
]


class Peer:
    """A socket on which ``data`` arrives in pieces, and whose other side then closes it."""

    def __init__(self, data: bytes, piece: int) -> None:
        self.data, self.piece, self.waited = data, piece, piece >= 32

    def send(self, data: bytes) -> int:
        return len(data)

    def recv(self, count: int, flags: int = 0) -> bytes:
        if not self.waited:
            self.waited = True
            raise BlockingIOError
        found = self.data[: min(count, self.piece)]
        if not flags:
            self.data = self.data[len(found) :]
            self.waited = self.piece >= 32
        return found


def seeds() -> Iterator[bytes]:
    proofs = [channel._mac(SECRET.encode(), side, NONCE + NONCE) for side in (b"visitor", b"host")]
    knock = json.dumps({"tag": WHEN.tag, "rank": 1}).encode() + b"\n"
    valid = (
        NONCE + proofs[0],
        NONCE + proofs[1],
        knock,
        WHEN.tag.encode() + b"\n",
        b'{"store": ["10.0.0.1", 29500]}\n',
        shard_server._REQUEST.pack(TOKEN.encode(), 3),
        connect._INTRODUCTION.pack(TOKEN.encode(), 3),
        connect._CONFIRMATION,
    )
    for number, data in enumerate(valid):
        yield bytes([number, number]) + data
    yield bytes([2, 3]) + knock.replace(b"1}", b"1e400}")
    yield bytes([4, 3]) + b'{"store": ["fe80::1%eth0", 1e400]}\n'


def run(data: bytes) -> None:
    if len(data) < 2:
        return
    handshake = HANDSHAKES[data[0] % len(HANDSHAKES)]
    peer = Peer(data[2:], PIECES[data[1] % len(PIECES)])
    run: HandshakeRun[Any] = HandshakeRun(peer, handshake())  # type: ignore[arg-type]
    while not run.proceed():
        pass
