"""Connections between the ranks of different hosts, which are threads on loopback here."""

import socket
import threading
import time

import pytest

from paceline.cluster.topology.network_interfaces import Link
from paceline.comm.hosts import connect
from paceline.comm.hosts.connect import PeerListener

HERE = Link("lo", "127.0.0.1")
NAMES = {0: "host1", 1: "host2", 2: "host3"}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(connect, "HANDSHAKE_TIMEOUT_S", 0.2)


def met(doors, disturb=None):
    """Connect all hosts; return the connections or the error of each host.

    ``disturb`` is called with all addresses before the hosts connect.
    """
    told, found = {host: door.address for host, door in doors.items()}, {}

    def one(host, door):
        others = {at: word for at, word in told.items() if at != host}
        try:
            found[host] = door.connect_all(host, others, NAMES)
        except OSError as error:
            found[host] = error.strerror

    threads = [threading.Thread(target=one, args=each) for each in doors.items()]
    if disturb is not None:
        disturb(told)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_pairs_of_hosts_are_connected():
    found = met({host: PeerListener(HERE) for host in NAMES})
    for a in NAMES:
        for b in NAMES:
            if a != b:
                end, other = found[a].sockets[b], found[b].sockets[a]
                assert end.getsockname() == other.getpeername()
                end.setblocking(True)
                end.send(bytes([a]))
    for a in NAMES:
        for b in NAMES:
            if a != b:
                assert found[a].sockets[b].recv(10) == bytes([b])
        found[a].close()
    assert found[0].descriptions[2] == "host3 (lo 127.0.0.1)"


def test_connection_with_wrong_token_is_rejected():
    strangers = []

    def disturb(told):
        for word in (b"x" * connect._INTRODUCTION.size, b"short", b""):  # two are incomplete
            address, port, *_ = told[0].split()
            strangers.append(socket.create_connection((address, int(port))))
            strangers[-1].send(word)

    found = met({host: PeerListener(HERE) for host in (0, 1)}, disturb)
    assert list(found[0].sockets) == [1]
    for one in strangers:
        one.settimeout(5)
        assert one.recv(1) == b""
        one.close()
    for one in found.values():
        one.close()


def test_unreachable_peer_is_reported_with_address():
    doors = {0: PeerListener(HERE), 1: PeerListener(HERE)}
    doors[0].close()
    told = {0: doors[0].address}
    said = r"no connection to host1 \(lo 127\.0\.0\.1\): Connection refused$"
    with pytest.raises(OSError, match=said):
        doors[1].connect_all(1, told, NAMES)
    waits, start = PeerListener(HERE), time.monotonic()
    said = r"no connection from host2 \(lo 127\.0\.0\.1\), host3 \(lo 127\.0\.0\.1\)$"
    with pytest.raises(OSError, match=said):
        waits.connect_all(0, {1: doors[1].address, 2: doors[1].address}, NAMES)
    assert time.monotonic() - start < 10


def test_interfaces_from_user_variables(monkeypatch):
    monkeypatch.setattr(connect, "network_links", lambda: [Link("eth0", "10.0.0.1"), HERE])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert {link.interface for link in connect.exchange_links()} == {"lo", "eth0"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with pytest.raises(
        OSError, match=r"GLOO_SOCKET_IFNAME=ib0 names no network interface that is up$"
    ):
        connect.exchange_links()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert connect.exchange_links() == [HERE]
