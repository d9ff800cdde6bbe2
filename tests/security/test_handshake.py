"""Visitors of a listening socket: which are accepted, dropped and counted, and when."""

import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from paceline.security import handshake
from paceline.security.handshake import (
    Acceptor,
    HandshakeError,
    HandshakeStep,
    HandshakeTimeoutError,
    RejectedConnections,
    run_handshake,
)


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def door(closing):
    """Return a function that makes an acceptor of visitors that say "open", and its client."""

    def made(word=word, **options):
        listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
        acceptor = closing.enter_context(Acceptor([listening], word, **options))

        def knock(source="127.0.0.1", say=b""):
            visitor = socket.create_connection(listening.getsockname(), 5.0, (source, 0))
            closing.callback(visitor.close)
            visitor.sendall(say)
            return visitor

        return acceptor, knock

    return made


def word(address):
    said = yield HandshakeStep(send=b"who?", read=4)
    if said != b"open":
        raise HandshakeError("the wrong word")
    yield HandshakeStep(send=b"welcome")
    return f"{said.decode()} from {address}"


def line(address):
    return (yield HandshakeStep(read=10, line=True))


def closed(visitor, seconds=5.0):
    """Return what the other side sent before it closed the connection."""
    visitor.settimeout(seconds)
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while more := visitor.recv(100):
            said += more
    return said


def test_connection_with_right_token_is_accepted_without_reading_on(door):
    acceptor, knock = door()
    visitor = knock(say=b"open the rest")
    ((connection, result),) = acceptor.wait(5.0)
    assert result == "open from 127.0.0.1"
    assert connection.recv(100) == b" the rest"
    assert visitor.recv(100) == b"who?welcome"
    assert acceptor.strangers.total == acceptor.pending == 0
    connection.close()


def test_silent_slow_and_wrong_connections_are_dropped_and_counted(door):
    acceptor, knock = door(seconds=0.3)
    silent, wrong, gone = knock(), knock(say=b"shut"), knock(say=b"op")
    gone.shutdown(socket.SHUT_WR)
    slow = knock()
    begun = time.monotonic()
    while acceptor.strangers.total < 4:
        assert acceptor.wait(0.05) == []
        with contextlib.suppress(OSError):
            slow.send(b"" if time.monotonic() - begun < 0.1 else b"o")
        assert time.monotonic() - begun < 2.0
    assert time.monotonic() - begun > 0.25
    assert [closed(one) for one in (silent, wrong, gone, slow)] == [b"who?"] * 4
    assert str(acceptor.strangers) == "127.0.0.1 (4)"


def test_thousand_silent_connections_do_not_block_or_start_threads(door):
    acceptor, knock = door()
    threads = threading.active_count()
    for number in range(1000):
        knock()
        # This process holds both ends, so the acceptor must run in between.
        if number % 200 == 199:
            acceptor.wait(0)
    knock(say=b"open")
    begun = time.monotonic()
    ((connection, _),) = acceptor.wait(5.0)
    assert time.monotonic() - begun < 1.0
    assert threading.active_count() == threads
    assert acceptor.pending <= handshake.MAX_PENDING_PER_ADDRESS
    connection.close()


def test_connections_over_limit_per_address_drop_its_oldest(door):
    acceptor, knock = door(max_per_address=3)
    other, *same = knock("127.0.0.2"), *(knock("127.0.0.3") for _ in range(5))
    assert acceptor.wait(0.1) == []
    assert acceptor.pending == 4
    assert [closed(one) for one in same[:2]] == [b"who?"] * 2
    assert str(acceptor.strangers) == "127.0.0.3 (2)"
    for one in (other, same[4]):
        one.send(b"open")
    found = []
    while len(found) < 2:
        found += acceptor.wait(5.0)
    assert {result for _, result in found} == {"open from 127.0.0.2", "open from 127.0.0.3"}
    for connection, _ in found:
        connection.close()


def test_connections_over_total_limit_drop_the_oldest(door):
    acceptor, knock = door(max_pending=3)
    visitors = [knock(f"127.0.0.{number}") for number in range(2, 7)]
    assert acceptor.wait(0.1) == []
    assert acceptor.pending == 3
    assert [closed(one) for one in visitors[:2]] == [b"who?"] * 2
    assert acceptor.strangers.by_address == {"127.0.0.2": 1, "127.0.0.3": 1}


def test_line_is_read_only_up_to_its_end(door):
    acceptor, knock = door(line)
    knock(say=b"123\n456\n")
    ((connection, result),) = acceptor.wait(5.0)
    assert (result, connection.recv(10)) == (b"123\n", b"456\n")
    connection.close()
    assert closed(in_turn(acceptor, knock(say=b"1234567890\n"))) == b""  # too long
    knock(say=b"123456789\n")
    ((connection, result),) = acceptor.wait(5.0)
    assert result == b"123456789\n"
    connection.close()


def in_turn(acceptor, visitor):
    before, deadline = acceptor.strangers.total, time.monotonic() + 5.0
    while acceptor.strangers.total == before and time.monotonic() < deadline:
        assert acceptor.wait(0.05) == []
    return visitor


def test_unparsable_greeting_is_rejected(door):
    def number(address):
        return int((yield HandshakeStep(read=3)))

    acceptor, knock = door(number)
    assert closed(in_turn(acceptor, knock(say=b"1x2"))) == b""
    knock(say=b"123")
    ((connection, result),) = acceptor.wait(5.0)
    assert result == 123
    connection.close()


def test_shut_down_listening_socket_raises(closing):
    listening = socket.create_server(("127.0.0.1", 0))
    acceptor = closing.enter_context(Acceptor([listening], word))
    threading.Timer(0.1, listening.shutdown, [socket.SHUT_RDWR]).start()
    begun = time.monotonic()
    with pytest.raises(OSError, match="was closed"):
        acceptor.wait(10.0)
    assert time.monotonic() - begun < 5.0


WITHOUT_DESCRIPTORS = """
import resource, socket, time
from paceline.security.handshake import Acceptor, HandshakeStep
def word(address):
    return (yield HandshakeStep(read=4))
listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
acceptor = Acceptor([listening], word, seconds=60.0)
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
print(listening.getsockname()[1], flush=True)
found = []
begun = time.process_time()
while len(found) < 2:
    found += acceptor.wait(10.0)
print(acceptor.strangers.total > 20, time.process_time() - begun < 5.0)
"""


def test_oldest_connection_is_dropped_when_descriptors_run_out(closing):
    process = closing.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_DESCRIPTORS], stdout=subprocess.PIPE, text=True
        )
    )
    closing.callback(process.kill)
    port = int(process.stdout.readline())
    for _ in range(2):
        for _ in range(60):
            closing.enter_context(socket.create_connection(("127.0.0.1", port)))
        closing.enter_context(socket.create_connection(("127.0.0.1", port))).send(b"open")
    assert process.communicate(timeout=30)[0] == "True True\n"


def test_pending_connections_are_limited_to_part_of_descriptors(door):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        acceptor, knock = door()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for number in range(150):
        knock(f"127.0.0.{2 + number % 5}")
    assert acceptor.wait(0.1) == []
    assert acceptor.pending == 100


def test_no_busy_wait_when_descriptors_run_out(door, monkeypatch):
    acceptor, knock = door()
    calls = []

    def full(self):
        calls.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", full)
        knock(say=b"open")
        assert acceptor.wait(0.35) == []
        assert 1 <= len(calls) <= 6
    ((connection, _),) = acceptor.wait(5.0)
    connection.close()


def test_rejected_addresses_are_counted_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(handshake, "MAX_COUNTED_ADDRESSES", 6)
    strangers = RejectedConnections()
    for number in range(10):
        for _ in range(10 - number):
            strangers.add(f"10.0.0.{number}")
    assert strangers.total == 55
    assert len(strangers.by_address) == 6
    assert str(strangers) == (
        "10.0.0.0 (10), 10.0.0.1 (9), 10.0.0.2 (8), 10.0.0.3 (7), other addresses (21)"
    )


def test_greeting_between_two_threads():
    ours, theirs = socket.socketpair()

    def visitor():
        said = yield HandshakeStep(read=4)
        yield HandshakeStep(send=b"open", read=7)
        return said

    with ours, theirs:
        found = []
        host = threading.Thread(target=lambda: found.append(run_handshake(ours, word("x"), 5.0)))
        host.start()
        assert run_handshake(theirs, visitor(), 5.0) == b"who?"
        host.join(5.0)
        assert found == ["open from x"]


def test_greeting_with_silent_or_slow_peer_times_out():
    ours, theirs = socket.socketpair()
    begun = time.monotonic()
    with ours, theirs:
        drip = threading.Timer(0.15, theirs.send, [b"o"])
        drip.start()
        with pytest.raises(HandshakeTimeoutError, match="no answer to the greeting in 0 s"):
            run_handshake(ours, word("x"), 0.3)
        assert 0.25 < time.monotonic() - begun < 2.0
        drip.join()


def test_peer_that_does_not_read_is_rejected():
    def much():
        yield HandshakeStep(send=bytes(10_000_000))

    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(HandshakeError, match="does not read"):
        run_handshake(ours, much(), 5.0)
