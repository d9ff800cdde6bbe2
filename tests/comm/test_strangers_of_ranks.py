"""Many unauthorized connections to the ports by which ranks and hosts find each other."""

import contextlib
import socket
import struct
import threading
import time
import uuid
from dataclasses import replace

import pytest
import ranks
import sets

from paceline.cluster.topology.network_interfaces import Link
from paceline.comm import rendezvous as module
from paceline.comm.hosts.connect import PeerListener
from paceline.comm.rendezvous import RendezvousSpec, join
from paceline.data import Shards, pack
from paceline.data.staging import shard_server
from paceline.security.folders import Folder
from paceline.security.handshake import HandshakeError, HandshakeStep


def test_rendezvous_among_1000_idle_connections(flooded):
    key = uuid.uuid4().hex
    first, second = (RendezvousSpec(rank, 2, ["127.0.0.1"], key, True) for rank in range(2))
    found = []
    host = threading.Thread(target=lambda: found.append(join(first, 60.0)))
    host.start()
    flooded("127.0.0.1", first.ports[0], garbage=2000)
    begun = time.monotonic()
    store = join(second, 30.0)
    host.join(10.0)
    assert time.monotonic() - begun < 20.0
    store.set("here", "1")
    assert found[0].get("here") == b"1"


@pytest.mark.parametrize("rank", ["Infinity", "1e400", "1" * 4000, "true", "1.0", '"1"', "-1"])
def test_request_with_invalid_rank_does_not_end_rank_0(rank):
    when = RendezvousSpec(0, 2, ["127.0.0.1"], uuid.uuid4().hex, True)
    host = threading.Thread(target=lambda: found.append(join(when, 20.0)))
    found: list = []
    host.start()
    knock(when.ports[0], f'{{"tag": "{when.tag}", "rank": {rank}}}\n'.encode())
    join(replace(when, rank=1), 10.0)
    host.join(10.0)
    assert len(found) == 1


def knock(port, said):
    deadline = time.monotonic() + 5.0
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 5.0) as door:
                door.sendall(said)
                assert door.recv(100) == b""
                return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "rank 0 does not listen"
            time.sleep(0.02)


@pytest.mark.parametrize(
    "said",
    [
        b'{"store": ["127.0.0.1", 1e400]}\n',
        b'{"store": ["127.0.0.1", 65536]}\n',
        b'{"store": ["127.0.0.1", 0]}\n',
        b'{"store": ["\\u001b[2J", 29500]}\n',
        b'{"store": "ab"}\n',
        b"[" * 4000 + b"\n",
        b"x" * 10_000,
        b"",
    ],
)
def test_invalid_response_to_store_request_is_ignored(closing, said):
    """Another user, who knows the job ID, runs a program that listens on the port."""
    when = RendezvousSpec(1, 2, ["127.0.0.1"], uuid.uuid4().hex, True)
    door = closing.enter_context(socket.create_server(("127.0.0.1", when.ports[0])))

    def answer():
        with door.accept()[0] as visitor, contextlib.suppress(OSError):
            visitor.recv(1000)
            visitor.sendall(when.tag.encode() + b"\n" + said)
            visitor.shutdown(socket.SHUT_WR)
            visitor.recv(1000)

    thread = threading.Thread(target=answer)
    thread.start()
    assert module._request_store(when, "127.0.0.1", when.ports[0], 5.0) == module.NOT_RANK_0
    thread.join(5.0)


def test_waiting_connections_per_rank_are_limited():
    """Any client that knows the job ID can open some; waiting connections are limited per rank."""
    when = RendezvousSpec(0, 3, ["127.0.0.1"], uuid.uuid4().hex, False)
    doorman = module._Rank0Server(when, 5.0)
    here = socket.create_server(("127.0.0.1", 0))
    made = []
    for _ in range(20):
        made.append(socket.create_connection(here.getsockname()))
        doorman._open(here.accept()[0], 1)
    assert len(doorman.waiting[1]) == module.MAX_WAITING_PER_RANK
    assert [one.recv(1) for one in made[:16]] == [b""] * 16
    for one in (*made, *doorman._waiting(), here):
        one.close()


def test_reset_connection_is_not_counted_as_rank():
    when = RendezvousSpec(0, 3, ["127.0.0.1"], uuid.uuid4().hex, True)
    doorman = module._Rank0Server(when, 5.0)
    with socket.create_server(("127.0.0.1", 0)) as here:
        visitor = socket.create_connection(here.getsockname())
        accepted = here.accept()[0]
        visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        visitor.close()
        doorman._open(accepted, 1)
    assert accepted.fileno() == -1
    assert doorman.missing == {1, 2}
    assert doorman.waiting == {}


def test_peers_connect_among_1000_idle_connections(flooded):
    doors = {host: PeerListener(Link("lo", "127.0.0.1")) for host in (0, 1)}
    names = {0: "host1", 1: "host2"}
    found = {}

    def connect(host):
        others = {at: door.address for at, door in doors.items() if at != host}
        found[host] = doors[host].connect_all(host, others, names)

    _, port, *_ = doors[0].address.split()
    flooded("127.0.0.1", int(port))
    begun = time.monotonic()
    threads = [threading.Thread(target=connect, args=(host,)) for host in doors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40.0)
    assert time.monotonic() - begun < 20.0
    assert found[0].sockets[1].getpeername() == found[1].sockets[0].getsockname()
    for one in found.values():
        one.close()


@pytest.mark.parametrize("manner", ["closed", "reset"])
def test_dropped_peer_reconnects(manner, monkeypatch):
    """A host that is busy with unauthorized connections may drop a peer."""
    door, begun = PeerListener(Link("lo", "127.0.0.1")), time.monotonic()
    dropped, real = [], PeerListener._handshake

    def handshake(self):
        if len(dropped) < 3:
            dropped.append((yield HandshakeStep(read=36 if manner == "closed" else 1)))
            raise HandshakeError("too many")
        return (yield from real(self))

    monkeypatch.setattr(PeerListener, "_handshake", handshake)
    names, found = {0: "host1", 1: "host2"}, []
    other = PeerListener(Link("lo", "127.0.0.1"))
    peer = threading.Thread(
        target=lambda: found.append(other.connect_all(1, {0: door.address}, names))
    )
    peer.start()
    met = door.connect_all(0, {1: other.address}, names)
    peer.join(10.0)
    assert len(dropped) == 3
    assert time.monotonic() - begun < 10.0
    assert met.sockets[1].getpeername() == found[0].sockets[0].getsockname()
    for one in (met, *found):
        one.close()


@pytest.fixture
def shards(tmp_path):
    """Yield a shard server of a packed dataset, and the dataset's shards."""
    pack(sets.arrays(40, (50,)), tmp_path / "set", shard_bytes=2000)
    (tmp_path / "set").chmod(0o700)
    found = Shards(tmp_path / "set").meta.shards
    server = shard_server.ShardServer("127.0.0.1", Folder.open(tmp_path / "set"), found)
    yield server, found
    server.close()


def test_shards_are_sent_among_1000_idle_connections(flooded, shards, tmp_path):
    server, found = shards
    threads = threading.active_count()
    flooded("127.0.0.1", int(server.name.split()[1]), garbage=2000)
    begun = time.monotonic()
    for number, shard in enumerate(found):
        with (tmp_path / "fetched").open("wb") as file:
            shard_server.fetch_shard(server.name, number, shard, file)
        assert (tmp_path / "fetched").read_bytes() == (tmp_path / "set" / shard.file).read_bytes()
    assert shard_server.is_alive(server.name)
    assert time.monotonic() - begun < 20.0
    ranks.wait_until(lambda: threading.active_count() == threads, 5)


@pytest.mark.parametrize("times", [2, 9])
def test_request_to_shard_server_is_retried_a_limited_number_of_times(shards, monkeypatch, times):
    server, _ = shards
    dropped, real = [], shard_server.ShardServer._admit

    def admit(self, visitor, number):
        if len(dropped) < times:
            dropped.append(visitor.close())
        else:
            real(self, visitor, number)

    monkeypatch.setattr(shard_server.ShardServer, "_admit", admit)
    monkeypatch.setattr(shard_server, "RETRIES_S", (0.01, 0.01, 0.01))
    assert shard_server.is_alive(server.name) == (times < 4)
    ranks.wait_until(lambda: len(dropped) == min(times, 4), 5)


def test_number_of_shard_sender_threads_is_limited(shards, monkeypatch, tmp_path):
    server, found = shards
    monkeypatch.setattr(shard_server, "MAX_SENDERS", 2)
    monkeypatch.setattr(shard_server, "MAX_WAITING", 3)
    let, real = threading.Event(), shard_server.ShardServer._send
    monkeypatch.setattr(
        shard_server.ShardServer, "_send", lambda *one: let.wait(10.0) and real(*one)
    )
    threads = threading.active_count()
    asked = []
    for served, waiting in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 3)):
        asked.append(shard_server._send_request(server.name, 0, 5.0))
        wanted = (served, waiting)
        ranks.wait_until(lambda now=wanted: (server._senders, len(server._waiting)) == now, 5)
    assert asked[-1].recv(8) == b""  # refused: two are served and three wait
    assert threading.active_count() == threads + 2
    assert shard_server.is_alive(server.name)
    let.set()
    assert [shard_server._receive_size(one, 5.0) for one in asked[:-1]] == [found[0].bytes] * 5
    for one in asked:
        one.close()
    ranks.wait_until(lambda: threading.active_count() == threads, 5)


def test_slow_shard_transfer_times_out(monkeypatch, tmp_path, shards):
    monkeypatch.setattr(shard_server, "ANSWER_TIMEOUT_S", 0.3)
    shard = shards[1][0]
    with socket.create_server(("127.0.0.1", 0)) as door:

        def drip():
            with door.accept()[0] as visitor, contextlib.suppress(OSError):
                visitor.sendall(shard_server._SIZE.pack(shard.bytes))
                for _ in range(50):
                    visitor.send(b"x")
                    time.sleep(0.1)

        thread = threading.Thread(target=drip)
        thread.start()
        begun = time.monotonic()
        name = f"127.0.0.1 {door.getsockname()[1]} {'0' * 32}"
        with (tmp_path / "fetched").open("wb") as file, pytest.raises(TimeoutError):
            shard_server.fetch_shard(name, 0, shard, file)
        assert time.monotonic() - begun < 3.0
        thread.join()
