"""Channels between Paceline's processes: messages, authentication and detected tampering."""

import os
import pickle
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from channels import accept_channel

from paceline.launch import channel
from paceline.launch.channel import (
    FRAME_HEADER,
    START_MARKER,
    Channel,
    InvalidMessageError,
    connect_channel,
    new_secret,
)
from paceline.launch.remote.start_agents import AgentConnections
from paceline.launch.remote.start_commands import LaunchTool

SECRET = new_secret()
# Messages of every kind: text, numbers, output that is not valid text, empty messages.
SAID = [
    ({"out": 3, "stream": 1}, b"\x00\xff not text \n"),
    ({"größe": [1, 2.5, None, {"a": "\n--"}]}, b""),
    ({}, b"x" * 3_000_000),
    ({"died": 0, "status": -9, "at": 12.25}, b""),
]


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pipes(closing):
    """Return two channels connected by two pipes, same as over ssh."""
    (to_right, from_left), (to_left, from_right) = os.pipe(), os.pipe()
    left, right = Channel(to_left, from_left), Channel(to_right, from_right)
    closing.callback(left.close)
    closing.callback(right.close)
    return left, right


class Between:
    """A visitor, its host, and a man in the middle who can read and change their messages."""

    def __init__(self, closing, visitors_secret=SECRET):
        self.seen = b""
        door, false_door = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        visitor = _in_thread(connect_channel, *false_door.getsockname(), visitors_secret, 10.0)
        self.to_visitor, _ = false_door.accept()
        self.to_host = socket.create_connection(door.getsockname())
        for end in (door, false_door, self.to_visitor, self.to_host):
            closing.callback(end.close)
        host = _in_thread(accept_channel, door.accept()[0], SECRET)
        for source, target, count in (
            (self.to_host, self.to_visitor, 32),
            (self.to_visitor, self.to_host, 64),
            (self.to_host, self.to_visitor, 32),
        ):
            data = source.recv(count, socket.MSG_WAITALL)
            self.seen += data
            if data:
                target.sendall(data)
            else:
                target.close()
        self.host, self.visitor = host(), visitor()
        for made in (self.host, self.visitor):
            if isinstance(made, Channel):
                closing.callback(made.close)

    def catch(self, **message):
        """Send a message from the visitor and return its whole frame instead of delivering it."""
        self.visitor.send(message)
        frame = self.to_visitor.recv(1 << 16)
        self.seen += frame
        return frame


def _in_thread(function, *args):
    """Call ``function`` in a thread; return a function that waits for its result or exception."""
    found = []

    def work():
        try:
            found.append(function(*args))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def result():
        thread.join(10.0)
        return found[0]

    return result


def all_of(receiver, count):
    found = []
    while len(found) < count:
        found += receiver.receive()
    return found


def to_the_end(receiver):
    found = []
    while (messages := receiver.receive()) is not None:
        found += messages
    return found


def exchange(left, right):
    """Send all messages of SAID in each direction, and receive them while they are sent."""
    for sender, receiver in ((left, right), (right, left)):
        sent = _in_thread(lambda sender=sender: [sender.send(*said) for said in SAID])
        assert all_of(receiver, len(SAID)) == SAID
        assert not isinstance(sent(), Exception)


def test_messages_and_raw_bytes_over_pipes(pipes):
    exchange(*pipes)
    pipes[0].close()
    assert pipes[1].receive() is None


def test_messages_and_raw_bytes_over_tcp(closing):
    door = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    visitor = _in_thread(connect_channel, *door.getsockname(), SECRET, 10.0)
    host = accept_channel(door.accept()[0], SECRET)
    closing.callback(host.close)
    exchange(host, visitor())
    visitor().close()
    assert host.receive() is None


def test_joined_and_fragmented_messages_are_received(pipes):
    left, right = pipes
    for number in range(3):
        left.send({"n": number})
    assert [message["n"] for message, _ in right.receive()] == [0, 1, 2]
    text = FRAME_HEADER.pack(8, 2) + b'{"n": 3}' + b"ab"
    for byte in text[:-1]:
        os.write(left._write_fd, bytes([byte]))
        assert right.receive() == []
    os.write(left._write_fd, text[-1:])
    assert right.receive() == [({"n": 3}, b"ab")]


def test_output_of_login_scripts_is_skipped(pipes):
    left, right = pipes
    for piece in (
        b"Welcome to host1!\n",
        b"\x00\x01{}--paceline\n",
        START_MARKER[:7],
        START_MARKER[7:],
    ):
        os.write(left._write_fd, piece)
    greeting = right.skip_login_output(5.0)
    assert greeting == b"Welcome to host1!\n\x00\x01{}--paceline\n"
    left.send({"place": 0})
    assert right.receive() == [({"place": 0}, b"")]


def test_message_received_with_login_output_is_not_lost(pipes):
    left, right = pipes
    os.write(left._write_fd, b"hello\n" + START_MARKER)
    left.send({"leaving": "no room"})
    left.close()
    assert right.skip_login_output(5.0) == b"hello\n"
    assert right.receive() == [({"leaving": "no room"}, b"")]


def test_login_output_without_start_marker_times_out(pipes):
    left, right = pipes
    os.write(left._write_fd, b"Password: ")
    begun = time.monotonic()
    assert right.skip_login_output(0.2) is None
    assert time.monotonic() - begun < 2.0
    left.close()
    assert right.skip_login_output(5.0) is None


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (FRAME_HEADER.pack((16 << 20) + 1, 0), "bytes"),
        (FRAME_HEADER.pack(2, 0xFFFFFFFF) + b"{}", "bytes"),
        (b"bash: no such command\n", "bytes"),
        (FRAME_HEADER.pack(5, 0) + b"[1,2]", "not a JSON object"),
        (FRAME_HEADER.pack(4, 0) + b"null", "not a JSON object"),
        (FRAME_HEADER.pack(3, 0) + b"{a}", "that can't be read as JSON"),
        (FRAME_HEADER.pack(2, 0) + b"\xff\xfe", "that can't be read as JSON"),
        (FRAME_HEADER.pack(0, 3) + b"abc", "that can't be read as JSON"),
        (FRAME_HEADER.pack(200_000, 0) + b"[" * 200_000, "can't be read as JSON"),
    ],
    ids=["long JSON", "long raw", "words", "list", "null", "no JSON", "no text", "none", "deep"],
)
def test_invalid_message_is_rejected(pipes, frame, said):
    left, right = pipes
    _in_thread(os.write, left._write_fd, frame)
    with pytest.raises(InvalidMessageError, match=said):
        to_the_end(right)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickle_is_never_loaded(pipes, tmp_path):
    left, right = pipes
    bomb = pickle.dumps(Bomb(str(tmp_path / "loaded")))
    left.send({"out": 0}, bomb)
    assert right.receive() == [({"out": 0}, bomb)]
    os.write(left._write_fd, FRAME_HEADER.pack(len(bomb), 0) + bomb)
    with pytest.raises(InvalidMessageError):
        right.receive()
    assert not (tmp_path / "loaded").exists()
    with pickle.loads(bomb):  # loading the pickle does run its code
        assert (tmp_path / "loaded").exists()


def test_peer_with_wrong_secret_is_rejected_by_both_sides(closing):
    between = Between(closing, visitors_secret=new_secret())
    assert between.host is None
    assert isinstance(between.visitor, OSError)
    assert SECRET.encode() not in between.seen


def test_host_without_secret_is_rejected(closing):
    door = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    address, port = door.getsockname()
    visitor = _in_thread(connect_channel, address, port, SECRET, 10.0)
    host, _ = door.accept()
    closing.callback(host.close)
    host.sendall(bytes(32))
    proof = host.recv(64, socket.MSG_WAITALL)[32:]
    host.sendall(proof)  # the visitor's proof, the only one that a false host knows
    assert isinstance(visitor(), OSError)
    assert str(visitor()) == f"127.0.0.1 port {port} does not know this job's secret"


def test_silent_connection_times_out(monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.3)
    ours, theirs = socket.socketpair()
    begun = time.monotonic()
    assert accept_channel(ours, SECRET) is None
    assert time.monotonic() - begun < 3.0
    assert len(theirs.recv(1000)) == 32
    assert theirs.recv(1000) == b""
    theirs.close()


def test_slow_handshake_times_out(monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.3)
    ours, theirs = socket.socketpair()
    outcome = _in_thread(accept_channel, ours, SECRET)
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < 5.0:
            theirs.send(b"x")
            time.sleep(0.1)
    except OSError:
        pass
    theirs.close()
    assert outcome() is None
    assert time.monotonic() - begun < 2.0


def test_modified_message_is_rejected(closing):
    for place, change in ((0, 1), (3, -1), (12, 1), (-1, 1)):  # lengths, text, hash
        between = Between(closing)
        frame = bytearray(between.catch(start=1))
        frame[place] = (frame[place] + change) % 256
        between.to_host.sendall(frame)
        with pytest.raises(InvalidMessageError):
            to_the_end(between.host)


def test_message_with_modified_length_is_not_received(closing):
    between = Between(closing)
    frame = bytearray(between.catch(start=1))
    frame[7] += 1
    between.to_host.sendall(frame)
    between.to_host.close()
    assert to_the_end(between.host) == []


def test_replayed_or_reflected_message_is_rejected(closing):
    between = Between(closing)
    first, second = between.catch(signal=1), between.catch(signal=2)
    between.to_host.sendall(first)
    assert between.host.receive() == [({"signal": 1}, b"")]
    between.to_host.sendall(first)  # replayed
    with pytest.raises(InvalidMessageError, match="keyed hash is wrong"):
        between.host.receive()
    between.to_visitor.sendall(first)  # reflected to its sender
    with pytest.raises(InvalidMessageError, match="keyed hash is wrong"):
        between.visitor.receive()
    other = Between(closing)
    other.catch(signal=1)
    other.to_host.sendall(second)  # from another connection with the same secret
    with pytest.raises(InvalidMessageError, match="keyed hash is wrong"):
        other.host.receive()


def test_secret_is_never_sent(closing):
    between = Between(closing)
    between.to_host.sendall(between.catch(begin={"A": "b"}))
    assert between.host.receive() == [({"begin": {"A": "b"}}, b"")]
    assert len(between.seen) > 128
    for form in (SECRET.encode(), bytes.fromhex(SECRET), SECRET[:16].encode()):
        assert form not in between.seen


def test_secret_reaches_agents_but_no_command_line(tmp_path, closing):
    """An unauthorized client connects first, then an agent with the secret."""
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import json, os, socket, sys\n"
        "where = sys.argv[sys.argv.index('--connect') + 1].split(';')[0].split(',')\n"
        "stranger = socket.create_connection((where[0], int(where[1])))\n"
        "stranger.sendall(bytes(64))\n"
        "open('secret', 'w').write(os.environ['PACELINE_SECRET'])\n"
        "os.execvp(sys.argv[1], sys.argv[1:])\n"
    )
    old = os.getcwd()
    os.chdir(tmp_path)
    closing.callback(os.chdir, old)
    start = LaunchTool("tool", sys.executable, str(tool))
    contact = AgentConnections(start, ["host1"])
    closing.callback(contact.close)
    (host,) = contact.start()
    assert host.name == socket.gethostname()  # the agent's host name, not "host1"
    secret = Path("secret").read_text()
    assert len(secret) == 64
    lines = b"".join(path.read_bytes() for path in _command_lines())
    assert b"paceline.launch.host_agent" in lines
    assert secret.encode() not in lines
    begun = time.monotonic()
    contact.close()
    assert time.monotonic() - begun < 3.0, "the agent did not see that the launcher has gone"


def _command_lines():
    for entry in Path("/proc").iterdir():
        path = entry / "cmdline"
        try:
            path.read_bytes()
        except OSError:
            continue
        if entry.name.isdigit():
            yield path
