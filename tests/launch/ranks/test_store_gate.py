"""The store of a job: ranks reach it through its gate, and nobody else reaches it."""

import shutil
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import ranks
import torch.distributed as dist
import users
from needs import need
from users import ATTACKER

from paceline.launch.ranks import store_gate
from paceline.launch.ranks.store_gate import open_store

CONNECT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])) as one:
        one.sendall(bytes(16))
        print(one.recv(1))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def opened():
    """Return a function that opens a store behind a gate, and closes it after the test."""
    made = []

    def make(ask_agents=None):
        made.append(open_store("127.0.0.1", 0, ask_agents))
        return made[-1]

    yield make
    for _, gate in made:
        gate.close()


def client(store, **more):
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, **more)


def test_ranks_use_store_through_its_gate(opened):
    store, _ = opened()
    first, second = client(store), client(store)
    found: list = []

    def wait_for_value():
        found.append(first.get("late"))

    waiting = threading.Thread(target=wait_for_value)
    waiting.start()
    large = b"x" * (6 << 20)  # more than the gate buffers
    second.set("large", large)
    assert first.clone().get("large") == large
    second.set("late", "value")
    waiting.join(10.0)
    assert found == [b"value"]
    del second
    assert client(store).add("number", 1) == 1


def test_store_itself_drops_connections_without_key(opened):
    store, gate = opened()
    hidden = gate._store.getsockname()
    assert hidden[1] == store.port
    with pytest.raises(TimeoutError):
        socket.create_connection(hidden, 0.3)


def test_other_user_reaches_neither_gate_nor_store(opened, capfd):
    store, gate = opened()
    own = client(store)
    for address, seconds in (("127.0.0.1", 5.0), (gate._store.getsockname()[0], 0.3)):
        said = users.python(ATTACKER, CONNECT, address, store.port, seconds)
        assert said.strip() in ("ConnectionResetError", "TimeoutError")
    assert capfd.readouterr().err.count(f"user {ATTACKER} of this node connected to the store") == 1
    own.set("alive", "1")
    assert own.get("alive") == b"1"


@pytest.fixture
def remote(opened, monkeypatch):
    """Return a gate that sees all connections from 127.0.0.9 as of another node, its questions, and
    a function that makes such a connection.
    """
    owner = store_gate.connection_owner
    monkeypatch.setattr(
        store_gate,
        "connection_owner",
        lambda peer, own: None if peer[0] == "127.0.0.9" else owner(peer, own),
    )
    questions: list = []
    store, gate = opened(lambda *question: questions.append(question))

    def connect():
        one = socket.create_connection(("127.0.0.1", store.port), 5.0, ("127.0.0.9", 0))
        one.settimeout(5.0)
        one.sendall(b"\x00\xce\xf7\x85\x3c\x0d\x01\x00\x00\x00")  # VALIDATE, PING 1
        return one

    return gate, questions, connect


def test_connection_from_other_node_waits_for_its_agent(remote):
    gate, questions, connect = remote
    with connect() as one, connect() as other:
        ranks.wait_until(lambda: len(questions) == 2)
        assert questions[0][1] == one.getsockname()
        gate.answer(questions[1][0], False)
        with pytest.raises(ConnectionResetError):
            other.recv(4)
        gate.answer(questions[0][0] + 1, True)  # of no connection
        gate.answer(questions[0][0], True)
        assert one.recv(4) == b"\x01\x00\x00\x00"


def test_connections_without_answer_are_limited(remote, monkeypatch):
    gate, questions, connect = remote
    monkeypatch.setattr(store_gate, "MAX_PENDING_PER_ADDRESS", 2)
    with connect() as oldest, connect(), connect():
        ranks.wait_until(lambda: len(questions) == 3)
        with pytest.raises(ConnectionResetError):
            oldest.recv(4)
        for number, _, _ in questions:
            gate.answer(number, False)
    monkeypatch.setattr(store_gate, "PENDING_TIMEOUT_S", 0.0)
    with connect() as late, pytest.raises(ConnectionResetError):
        late.recv(4)


def test_port_in_use_is_an_error(opened):
    store, _ = opened()
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", store.port, None)


def test_kernel_without_signatures_is_reported(opened, monkeypatch, capfd):
    monkeypatch.setattr(store_gate, "_TCP_MD5SIG_EXT", 0x7FFF)  # an option that no kernel has
    store, _ = opened()
    client(store, timeout=timedelta(seconds=5)).set("still", "works")
    assert "other users of this node can connect to the store" in capfd.readouterr().err


OPEN = """
import os, sys
from paceline.launch.ranks.store_gate import open_store
for before in sys.argv[1:]:
    assert os.system(before) == 0
try:
    open_store("127.0.0.1", 0)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("ip link set lo down", "Network is unreachable"),
        ("ip link set lo up; ip addr del 127.0.0.1/8 dev lo", "Cannot assign requested address"),
    ],
)
def test_node_without_loopback_is_an_error_that_names_it(state, reason):
    need([*users.missing(), *(["ip"] if shutil.which("ip") is None else [])])
    words = ["unshare", "-n", sys.executable, "-c", OPEN, state]
    said = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
    assert said.startswith(
        f"the loopback interface of this node can't be used (127.0.0.1: {reason})"
    )
    assert "HINT: ip link set lo up" in said


def test_store_without_free_descriptors_is_an_error():
    words = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", sys.executable, "-c", OPEN]
    said = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
    assert "Too many open files; the limit of a process is 24 (ulimit -Hn). HINT: " in said


def test_store_that_can_not_be_reached_has_a_time_limit(monkeypatch, opened):
    monkeypatch.setattr(store_gate, "OPEN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(store_gate.StoreGate, "_accept", lambda self: time.sleep(0.01))
    with pytest.raises(ValueError, match=r"can't be reached from its own node within .* HINT: "):
        opened()
