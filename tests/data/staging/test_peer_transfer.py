"""Staging on several nodes: each shard is read once from its origin, by one of the nodes."""

import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import sets
from torch.distributed import TCPStore

from paceline.data import Shards, pack
from paceline.data.staging import peer_transfer, shard_server
from paceline.data.staging.peer_transfer import PeerTransfer, join_peer_transfer
from paceline.data.staging.shard_server import ShardServer
from paceline.data.staging.stage import _files, stage
from paceline.data.staging.staged_sets import staged_path
from paceline.security.folders import Folder


@pytest.fixture
def packed(tmp_path):
    """Pack 40 shards of ten samples."""
    x, y = sets.arrays(400, (50,))
    pack((x, y), tmp_path / "set", shard_bytes=2000)
    return tmp_path / "set"


@pytest.fixture
def job(monkeypatch):
    """Return a function that sets the number of nodes (threads) and returns their store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(peer_transfer, "PEER_CHECK_DELAY_S", 0.3)
    monkeypatch.setattr("paceline.data.staging.fetch_shards.PEER_CHECK_DELAY_S", 0.3)

    def of(hosts, absent=0):
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(hosts))
        if absent:  # do not wait long for absent nodes
            monkeypatch.setattr(peer_transfer, "READY_TIMEOUT_S", 0.2)
        return store

    return of


def staged(packed, roots, **options):
    """Stage on all nodes, one root each, and return their reports."""
    with ThreadPoolExecutor(len(roots)) as pool:
        calls = [pool.submit(stage, packed, root, together=True, **options) for root in roots]
        return [call.result(timeout=60) for call in calls]


def content(folder):
    return {name: data for name, data in sets.contents(folder).items() if name[0] != "."}


@pytest.mark.parametrize("hosts", [2, 3, 5])
def test_each_shard_is_read_once_for_all_nodes(packed, tmp_path, job, hosts):
    job(hosts)
    found = staged(packed, [tmp_path / f"host{i}" for i in range(hosts)])
    size = sum((packed / one.file).stat().st_size for one in _files(packed, Shards(packed).meta))
    assert sum(one.read for one in found) == size
    assert [one.bytes for one in found] == [size] * hosts
    assert [(one.here, one.copied, one.left) for one in found] == [(40, 40, [])] * hosts
    assert sum(one.fetched for one in found) == 40 * (hosts - 1)
    for one in found:
        assert content(one.folder) == content(packed)
        assert {told["copied"] for told in one.hosts} == {40}
    again = staged(packed, [tmp_path / f"host{i}" for i in range(hosts)])
    assert {(one.here, one.copied, one.bytes) for one in again} == {(40, 0, 0)}


def test_shards_already_staged_are_fetched_from_peer(packed, tmp_path, job):
    stage(packed, tmp_path / "host0")
    job(2)
    found = staged(packed, [tmp_path / "host0", tmp_path / "host1"])
    assert [one.copied for one in found] == [0, 40]
    assert sum(one.read for one in found) == 0
    assert content(found[1].folder) == content(packed)


def test_nodes_with_limited_space_stage_disjoint_shards(packed, tmp_path, job):
    job(3)
    beside = sum((packed / name).stat().st_size for name in ("index.bin", "paceline.json"))
    room = beside + 10 * (packed / "shard-00000.bin").stat().st_size + 100
    found = staged(packed, [tmp_path / f"host{i}" for i in range(3)], room=room)
    assert [one.here for one in found] == [10, 10, 10]
    parts = [{one.name for one in found[i].folder.glob("shard-*")} for i in range(3)]
    assert len(set.union(*parts)) == 30
    assert [len(one.left) for one in found] == [30, 30, 30]


def test_nodes_with_different_space_stage_what_fits(packed, tmp_path, job):
    job(2)
    beside = sum((packed / name).stat().st_size for name in ("index.bin", "paceline.json"))
    room = beside + 10 * (packed / "shard-00000.bin").stat().st_size + 100
    with ThreadPoolExecutor(2) as pool:
        small = pool.submit(stage, packed, tmp_path / "small", room=room, together=True)
        large = pool.submit(stage, packed, tmp_path / "large", together=True)
        assert (small.result(60).here, large.result(60).here) == (10, 40)
    assert (small.result().folder / "index.bin").exists()
    assert small.result().read + large.result().read <= sum(
        (packed / one.file).stat().st_size for one in _files(packed, Shards(packed).meta)
    )


def dead(packed, claims):
    """Claim shards as a node that then dies."""
    files = _files(packed, Shards(packed).meta)
    one = join_peer_transfer(staged_path(packed, packed).name, None, files, os.environ)
    claimed = [one.claim() for _ in range(claims)]
    one.publish(claimed[0])  # announced, but never served
    one.end({"host": "dead", "copied": 0})
    one.close()
    return claimed


def test_shard_given_up_by_one_node_is_claimed_by_another(packed, job):
    job(2)
    files = _files(packed, Shards(packed).meta)
    one, other = (
        join_peer_transfer(staged_path(packed, packed).name, None, files, os.environ) for _ in "ab"
    )
    claimed = [one.claim() for _ in files]
    assert sorted(claimed) == list(range(len(files)))
    one.give_up(3)
    assert one.claim() is None  # this node has no room for it
    assert [other.claim(), other.claim()] == [3, None]
    assert not one.take_over(3)  # the other node is alive
    for each in (one, other):
        each.close()


def test_shard_taken_over_is_not_claimed_again(packed, job):
    job(2)
    files = _files(packed, Shards(packed).meta)
    one, other = (
        join_peer_transfer(staged_path(packed, packed).name, None, files, os.environ) for _ in "ab"
    )
    assert other.take_over(1)
    assert [one.claim(), one.claim()] == [0, 2]
    for each in (one, other):
        each.close()


def test_claims_of_lost_node_are_taken_over(packed, tmp_path, job):
    job(3, absent=1)
    claimed = dead(packed, claims=7)
    assert len(set(claimed)) == 7
    found = staged(packed, [tmp_path / "host0", tmp_path / "host1"])
    assert [one.here for one in found] == [40, 40]
    for one in found:
        assert content(one.folder) == content(packed)
    assert not any(one.error for one in found)


def test_unreachable_store_falls_back_to_reading_from_origin(packed, tmp_path, job, monkeypatch):
    job(2)
    monkeypatch.setattr(peer_transfer, "JOIN_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        monkeypatch.setenv("MASTER_PORT", str(nobody.getsockname()[1]))
    found = stage(packed, tmp_path / "host0", together=True)
    assert (found.here, found.fetched) == (40, 0)
    assert "the job's store does not answer" in found.notes[0]


def test_store_lost_during_staging_is_tolerated(packed, tmp_path, job, monkeypatch):
    job(2)
    asked = []

    def lost(self):
        asked.append(1)
        if len(asked) > 5:
            raise peer_transfer.StoreLostError
        return claim(self)

    claim = PeerTransfer.claim
    monkeypatch.setattr(PeerTransfer, "claim", lost)
    found = staged(packed, [tmp_path / "host0", tmp_path / "host1"])
    assert [one.here for one in found] == [40, 40]


def test_staging_failure_on_one_node_is_reported_on_all_nodes(packed, tmp_path, job):
    job(2, absent=1)
    (tmp_path / "file").touch()
    found = staged(packed, [tmp_path / "file", tmp_path / "host1"])
    assert "HINT: choose a folder of this host" in found[0].error
    assert (found[1].here, found[1].error) == (40, "")
    assert {told["error"] for told in found[1].hosts} == {"", found[0].error}


def test_corrupted_shard_from_peer_is_detected(packed, tmp_path, job):
    first = stage(packed, tmp_path / "host0")
    shard = first.folder / "shard-00003.bin"
    data = bytearray(shard.read_bytes())
    data[7] ^= 1
    shard.write_bytes(data)
    job(2)
    found = staged(packed, [tmp_path / "host0", tmp_path / "host1"])
    assert content(found[1].folder) == content(packed)


def test_connection_with_wrong_token_is_rejected(packed):
    packed.chmod(0o700)
    one = ShardServer("127.0.0.1", Folder.open(packed), Shards(packed).meta.shards)
    address, port, token = one.name.split()
    for word, wanted in ((b"0" * 32, b""), (token.encode(), struct.pack("!Q", 2000))):
        with socket.create_connection((address, int(port))) as channel:
            channel.sendall(struct.pack("!32sI", word, 0))
            assert channel.recv(8) == wanted
    one.close()


def test_unresponsive_node_is_skipped(packed, tmp_path, job, monkeypatch):
    """A node that has claimed shards accepts connections and never answers."""
    store = job(2, absent=1)
    monkeypatch.setattr(shard_server, "ALIVE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(shard_server, "ANSWER_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        files = _files(packed, Shards(packed).meta)
        one = join_peer_transfer(staged_path(packed, packed).name, None, files, os.environ)
        one._own = f"127.0.0.1 {mute.getsockname()[1]} {'0' * 32}"
        claimed = [one.claim() for _ in range(3)]
        one.publish(claimed[0])
        one.end({"host": "mute"})
        found = stage(packed, tmp_path / "host0", together=True)
        one.close()
    assert store.check([f"{peer_transfer.PREFIX}/0/{found.folder.name}/results/1"])
    assert (found.here, found.fetched) == (40, 0)
    assert content(found.folder) == content(packed)
