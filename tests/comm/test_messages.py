"""Sends and receives through memory: content, order, tags, and what ends a wait."""

import gc
import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.comm.shared import messages
from paceline.comm.shared.collective_calls import ExchangeError
from paceline.comm.shared.messages import Messages


def pair(is_alive=lambda _: True, timeout=5.0):
    store = dist.HashStore()
    return [Messages(store, rank, [4, 7], is_alive, timeout) for rank in range(2)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.empty(0, 3),
        torch.randn(1 << 18),
    ],
)
def test_a_tensor_arrives_as_it_was_sent(tensor):
    first, second = pair()
    sent = tensor.clone()
    first.send(sent, 1, 0)
    if sent.dtype != torch.bool:
        sent.mul_(0)  # it may be changed at once
    found = torch.empty_like(tensor)
    assert second.receive(found, 0, 0).wait()
    assert found.equal(tensor)


def test_messages_keep_their_order_by_tag_whatever_is_waited_for_first():
    first, second = pair()
    for number, tag in enumerate((1, 2, 1, 2)):
        first.send(torch.tensor([number]), 1, tag)
    found = [torch.zeros(1, dtype=torch.long) for _ in range(4)]
    works = [second.receive(t, 0, tag) for t, tag in zip(found, (2, 2, 1, 1), strict=True)]
    for work in reversed(works):
        work.wait()
    assert [t.item() for t in found] == [1, 3, 0, 2]


def test_a_receive_from_any_rank_knows_its_sender():
    first, second = pair()
    found = torch.zeros(1)
    work = second.receive(found, None, 5)
    assert not work.is_completed()
    first.send(torch.ones(1), 1, 5)
    work.wait()
    assert (work._source_rank(), found.item()) == (0, 1.0)


def test_thousands_of_sends_do_not_wait_for_a_receive():
    first, second = pair()
    for number in range(3000):  # more than a socket has room for
        first.send(torch.tensor([number]), 1, 0)
    found = torch.zeros(1, dtype=torch.long)
    for number in range(3000):
        second.receive(found, 0, 0).wait()
        assert found.item() == number


def test_places_are_used_again():
    first, second = pair()
    found = torch.empty(1000)
    for _ in range(50):
        first.send(torch.ones(1000), 1, 0)
        second.receive(found, 0, 0).wait()
    assert os.fstat(first._outboxes[1]._file).st_size <= 2 * 4096


def test_large_places_are_returned(monkeypatch):
    monkeypatch.setattr(messages, "KEPT_BYTES", 1 << 20)
    first, second = pair()
    found = torch.empty(1 << 19)
    for number in range(3):
        first.send(torch.full((1 << 19,), float(number)), 1, 0)
        second.receive(found, 0, 0).wait()
        assert found[0] == found[-1] == number
    first.send(torch.ones(1), 1, 0)
    assert os.fstat(first._outboxes[1]._file).st_size < 1 << 20


def test_a_receive_of_another_size_is_an_error():
    first, second = pair()
    first.send(torch.ones(4), 1, 0)
    with pytest.raises(ExchangeError, match=r"rank 4 has sent 16 bytes, and .* 8\. HINT: "):
        second.receive(torch.ones(2), 0, 0).wait()


def test_a_sender_that_has_ended_is_named_after_its_last_message():
    alive = [True]
    first, second = pair(lambda _: alive[0])
    first.send(torch.ones(1), 1, 0)
    works = [second.receive(torch.zeros(1), 0, 0) for _ in range(2)]
    first.close()
    alive[0] = False
    works[0].wait()
    with pytest.raises(ExchangeError, match="can't continue: rank 4 has died"):
        works[1].wait()


def test_a_send_to_a_rank_that_has_ended_is_an_error():
    alive = [True]
    first, second = pair(lambda _: alive[0])
    first.send(torch.ones(1), 1, 0)
    second.take_arrived()
    second.close()
    alive[0] = False
    with pytest.raises(ExchangeError, match="can't continue: rank 7 has died"):
        first.send(torch.ones(1), 1, 0)


def test_a_receive_ends_after_its_timeout():
    first, second = pair(timeout=0.1)
    late, found = torch.zeros(1), torch.zeros(1)
    with pytest.raises(ExchangeError, match=r"rank 4 did not send them within 0\.1 s\. HINT"):
        second.receive(late, 0, 0).wait()
    first.send(torch.ones(1), 1, 0)  # is for the next receive
    second.receive(found, 0, 0).wait()
    assert (late.item(), found.item()) == (0.0, 1.0)


def test_a_receive_from_any_rank_ends_with_the_last_other_one():
    _, second = pair(lambda _: False)
    with pytest.raises(ExchangeError, match="can't continue: rank 4 and all others have died"):
        second.receive(torch.zeros(1), None, 0).wait()


def test_a_wait_for_a_send_waits_for_the_receiver_where_memory_is_taken(monkeypatch):
    monkeypatch.setattr(messages, "MAX_UNRECEIVED_BYTES", 8192)
    first, second = pair(timeout=60.0)
    works = [first.send(torch.full((1000,), float(n)), 1, 0) for n in range(3)]
    assert not any(work.is_completed() for work in works)
    with pytest.raises(ExchangeError, match=r"send of 4,000 bytes: rank 7 did not receive them"):
        works[2].wait(timedelta(milliseconds=1))
    found = torch.zeros(1000)
    second.receive(found, 0, 0).wait()
    assert works[2].wait()
    del works
    waiting = threading.Thread(target=first.send(torch.ones(1000), 1, 0).wait)
    waiting.start()
    second.receive(found, 0, 0).wait()
    waiting.join(30.0)
    assert not waiting.is_alive()
    assert found[0] == 1


def test_ranks_that_end_do_not_wait_for_each_other():
    first, second = pair(timeout=60.0)
    for _ in range(1000):
        first.send(torch.ones(1), 1, 0)
        second.send(torch.ones(1), 0, 0)
    ending = [
        threading.Thread(target=lambda o=one: (o.flush(), o.close())) for one in (first, second)
    ]
    for one in ending:
        one.start()
    for one in ending:
        one.join(30.0)
        assert not one.is_alive()


def test_places_of_many_messages_are_free_again():
    first, second = pair()
    for _ in range(1000):
        first.send(torch.ones(1), 1, 0)
    for _ in range(1000):  # more than the socket of the sender has room for
        second.receive(torch.zeros(1), 0, 0).wait()
    outbox = first._outboxes[1]
    deadline = time.monotonic() + 30.0
    while outbox._unreceived and time.monotonic() < deadline:
        outbox.take_freed()
    assert (outbox._unreceived, outbox._unreceived_bytes) == ({}, 0)


def test_a_receiver_without_descriptors_says_so(monkeypatch):
    first, second = pair()
    monkeypatch.setattr(
        socket, "recv_fds", lambda *_: (messages._HELLO.pack(0), [], socket.MSG_CTRUNC, None)
    )
    first.send(torch.ones(1), 1, 0)
    with pytest.raises(ExchangeError, match=r"Too many open files\. HINT: ulimit -n"):
        second.receive(torch.zeros(1), 0, 0).wait()


def test_a_message_wakes_a_rank_that_waits():
    first, second = pair(timeout=60.0)
    found = torch.zeros(1)
    waiting = threading.Thread(target=second.receive(found, 0, 0).wait)
    waiting.start()
    first.send(torch.ones(1), 1, 0)
    waiting.join(30.0)
    assert found.item() == 1.0


def test_a_stranger_on_the_socket_is_ignored():
    first, second = pair()
    address = second._store.get("1").decode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{address}")
        stranger.send(b"hello")
        first.send(torch.ones(1), 1, 0)
        found = torch.zeros(1)
        second.receive(found, 0, 0).wait()
    assert found.item() == 1.0


def test_nothing_stays_open():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    first, second = pair()
    for a, b, to in ((first, second, 1), (second, first, 0)):
        a.send(torch.ones(1), to, 0)
        b.receive(torch.zeros(1), 1 - to, 0).wait()
    del first, second, a, b
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
