"""The user of the other end of a TCP connection within the node."""

import contextlib
import os
import socket
import sys

import pytest
import users
from users import ATTACKER

from paceline.launch.ranks import connection_owner

WAYS = [connection_owner._ask_netlink, connection_owner._search_tables]


@contextlib.contextmanager
def connected(address, target):
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    server_family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=server_family)
    with server, socket.socket(family) as one:
        one.connect((target, server.getsockname()[1]))
        accepted, _ = server.accept()
        with accepted:
            yield one, accepted.getpeername()[:2], accepted.getsockname()[:2]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("address", "target"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1"), ("::1", "::1")],
)
def test_owner_of_connection(way, address, target):
    with connected(address, target) as (one, peer, own):
        assert way(peer, own) == os.getuid()
        assert way(peer, ("127.0.0.77", 1)) is None
        assert way(own, own) is None  # the listening socket is no connection
        one.close()
        assert way(peer, own) is None


@pytest.mark.parametrize("way", WAYS)
def test_owner_of_another_users_connection(way):
    code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = [sys.executable, "-c", f"{code}; sys.stdin.read()", port]
        other = users.start(ATTACKER, *words, stdin=-1)
        try:
            server.settimeout(20.0)
            accepted, peer = server.accept()
            with accepted:
                assert way(peer, accepted.getsockname()) == ATTACKER
        finally:
            other.communicate("")


def test_kernel_without_netlink_sockets(monkeypatch):
    def unavailable(*_):
        raise OSError("no such protocol")

    monkeypatch.setattr(connection_owner, "_ask_netlink", unavailable)
    with connected("127.0.0.1", "127.0.0.1") as (_, peer, own):
        assert connection_owner.connection_owner(peer, own) == os.getuid()
