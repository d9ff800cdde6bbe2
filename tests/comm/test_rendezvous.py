"""Rendezvous of ranks without a configured address: search, shared store and errors."""

import json
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack

import pytest

from paceline.cluster.topology.network_interfaces import network_links
from paceline.comm import rendezvous as module
from paceline.comm.reachable_address import listen_on
from paceline.comm.rendezvous import RendezvousSpec, join


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


def appointment(rank, size, hosts=("127.0.0.1",), key=None, one_host=True):
    return RendezvousSpec(rank, size, list(hosts), key or uuid.uuid4().hex, one_host)


def all_of(size, timeout=10.0, key=None, **more):
    """Call ``join`` on all ranks, as threads, the last rank first; return results or exceptions."""
    key = key or uuid.uuid4().hex
    found = {}

    def rank(number):
        try:
            found[number] = join(appointment(number, size, key=key, **more), timeout)
        except ValueError as mistake:
            found[number] = mistake

    threads = [threading.Thread(target=rank, args=(n,)) for n in reversed(range(size))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(timeout + 10.0)
    return [found[number] for number in range(size)]


def assert_shared(stores):
    for number, store in enumerate(stores):
        assert not isinstance(store, ValueError), store
        store.set(f"from {number}", str(number))
    for store in stores:
        assert [store.get(f"from {n}") for n in range(len(stores))] == [
            str(n).encode() for n in range(len(stores))
        ]


def test_rendezvous_on_loopback_for_one_host():
    stores = all_of(3)
    assert_shared(stores)
    assert {store.host for store in stores} == {"127.0.0.1"}


def test_rendezvous_at_resolved_host_name():
    """The store listens only on the address where the ranks met."""
    stores = all_of(2, hosts=["no-such-host.invalid", "localhost"], one_host=False)
    assert_shared(stores)
    for link in network_links():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((link.address, stores[0].port), timeout=5.0)


def test_rendezvous_if_host_name_resolves_to_other_loopback_address():
    """Debian's /etc/hosts maps a host's name to 127.0.1.1."""
    assert_shared(all_of(2, timeout=3.0, hosts=["127.0.1.1"], one_host=False))


def test_rendezvous_of_processes_without_configured_port(tmp_path):
    code = (
        "import sys\n"
        "from paceline.comm.rendezvous import RendezvousSpec, join\n"
        f"when = RendezvousSpec(int(sys.argv[1]), 2, ['localhost'], '{uuid.uuid4().hex}', False)\n"
        "store = join(when, 30.0)\n"
        "store.set(sys.argv[1], 'here')\n"
        "print(store.get('0'), store.get('1'))\n"
        "store.add('done', 1)\n"
        "while when.rank == 0 and store.add('done', 0) < 2:\n"
        "    pass\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, rank], stdout=subprocess.PIPE, text=True)
        for rank in ("1", "0")
    ]
    try:
        for process in started:
            assert process.communicate(timeout=60)[0] == "b'here' b'here'\n"
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("manner", ["says nothing", "hangs up", "says something else"])
def test_port_used_by_other_program_is_skipped(closing, manner):
    when = appointment(1, 2)
    other = closing.enter_context(listen_on("127.0.0.1", when.ports[0]))
    over = threading.Event()

    def program():
        while not over.is_set():
            if select.select([other], [], [], 0.1)[0]:
                visitor = closing.enter_context(other.accept()[0])
                if manner == "says something else":
                    visitor.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                elif manner == "hangs up":
                    visitor.close()

    running = threading.Thread(target=program)
    running.start()
    closing.callback(running.join)
    closing.callback(over.set)
    assert_shared(all_of(2, timeout=5.0, key=when.key))


def test_all_ports_in_use_is_reported(closing):
    when = appointment(0, 2)
    for port in when.ports:
        closing.enter_context(listen_on("127.0.0.1", port))
    first, last = when.ports[0], when.ports[-1]
    with pytest.raises(ValueError, match=f"ports {first} to {last} are all in use on .*HINT"):
        join(when, 5.0)


def test_two_jobs_with_same_ports_do_not_mix(monkeypatch):
    monkeypatch.setattr(RendezvousSpec, "ports", property(lambda _: [PORT + i for i in range(8)]))
    keys = uuid.uuid4().hex, uuid.uuid4().hex
    found = {}
    threads = [
        threading.Thread(target=lambda key=key: found.update({key: all_of(2, key=key)}))
        for key in keys
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    for key in keys:
        assert_shared(found[key])
    assert found[keys[0]][0].port != found[keys[1]][0].port


PORT = 32_100  # above RendezvousSpec.ports


def test_missing_ranks_are_reported_within_timeout():
    key = uuid.uuid4().hex
    came = threading.Thread(target=lambda: join(appointment(1, 4, key=key), 5.0), daemon=True)
    came.start()
    begun = time.monotonic()
    with pytest.raises(
        ValueError, match=r"ranks 2-3 did not connect to rank 0 .* within 1 s. HINT"
    ):
        join(appointment(0, 4, key=key), 1.0)
    assert time.monotonic() - begun < 4.0
    came.join(10.0)


def test_many_missing_ranks_are_reported_in_short():
    with pytest.raises(ValueError, match=r"ranks 1-99 did not connect to rank 0"):
        join(appointment(0, 100), 0.2)


def test_missing_rank_0_is_reported_with_tried_addresses():
    when = appointment(1, 2, hosts=["localhost"], one_host=False)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"rank 1 on .* did not find rank 0 in 1 s") as raised:
        join(when, 1.0)
    assert time.monotonic() - begun < 4.0
    assert f"Tried ports {when.ports[0]} to {when.ports[-1]} of:" in str(raised.value)
    assert "localhost = 127.0.0.1: connection refused\n" in str(raised.value)


def test_unknown_host_is_reported_within_seconds(monkeypatch, closing):
    """The error comes before the time for late ranks is over."""
    monkeypatch.setattr(module, "UNREACHABLE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 1.0)
    when = appointment(1, 2, hosts=["no-such-host.invalid", "127.0.0.9"], one_host=False)
    full(closing, "127.0.0.9", when.ports[0])
    begun = time.monotonic()
    with pytest.raises(ValueError, match="did not find rank 0") as raised:
        join(when, 300.0)
    assert time.monotonic() - begun < 10.0
    assert "\n    no-such-host.invalid: the name can't be resolved (" in str(raised.value)
    assert "\n    127.0.0.9: no answer in 1 s\n" in str(raised.value)


def full(closing, address, port):
    """Make an address that does not answer, because its queue of connections is full."""
    silent = closing.enter_context(socket.socket())
    silent.bind((address, port))
    silent.listen(0)
    for _ in range(3):
        waiting = closing.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex((address, port))


def test_rank_0_reports_that_other_hosts_are_unreachable(monkeypatch, closing):
    monkeypatch.setattr(module, "UNREACHABLE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 1.0)
    when = appointment(0, 2, hosts=["no-such-host.invalid", "127.0.0.9"], one_host=False)
    full(closing, "127.0.0.9", when.ports[0])
    begun = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 did not connect to rank 0") as raised:
        join(when, 300.0)
    assert time.monotonic() - begun < 10.0
    assert "can't reach the other hosts either:\n" in str(raised.value)
    assert "    127.0.0.9: no answer in 1 s\n" in str(raised.value)


def test_unauthorized_connections_are_rejected_without_blocking_ranks():
    when = appointment(1, 2)
    found = []
    host = threading.Thread(target=lambda: found.append(join(appointment(0, 2, key=when.key), 10)))
    host.start()
    own = {"tag": when.tag, "rank": 1}
    for said in (
        {**own, "tag": "0" * 64},
        {**own, "rank": 0},
        {**own, "rank": 2},
        {**own, "rank": None},
        {"tag": when.tag},
        [],
        "x" * 5000,
    ):
        assert answer_to(when.ports[0], json.dumps(said).encode() + b"\n") == b""
    assert answer_to(when.ports[0], b"\xff\xfe\n") == b""
    assert answer_to(when.ports[0], b"[" * 4096) == b""
    found.insert(0, join(when, 10.0))
    host.join(10.0)
    assert_shared(found)


def answer_to(port, said):
    deadline = time.monotonic() + 5.0
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5.0) as door:
                door.sendall(said)
                return door.recv(1000)
        except ConnectionResetError:
            return b""
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "rank 0 is not at its door any more"
            time.sleep(0.02)
