"""Choice of the network interface for the ranks. tests/launch has tests with several hosts."""

import datetime
import os
import threading
import time

import pytest
from torch._C._distributed_c10d import TCPStore

from paceline.comm.rendezvous import agree_on_interface

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@pytest.fixture
def store(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return TCPStore("127.0.0.1", 0, 3, True, datetime.timedelta(seconds=10), False)


def client(store):
    """Return a new connection to the store; every rank has a separate one."""
    timeout = datetime.timedelta(seconds=10)
    return TCPStore("127.0.0.1", store.port, 3, False, timeout, False)


def test_ranks_on_one_host_need_no_interface(store):
    found = {}

    def rank(number):
        found[number] = agree_on_interface(client(store), number, 3, 10.0)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15.0)
    assert found == {0: "", 1: "", 2: ""}
    assert not set(VARIABLES) & set(os.environ)


def test_missing_rank_times_out(store):
    begun = time.monotonic()
    with pytest.raises(
        ValueError, match=r"^paceline.init: rank 1 did not join within 1 s. HINT: check"
    ):
        agree_on_interface(store, 0, 2, 1.0)
    assert time.monotonic() - begun < 4.0
    assert not set(VARIABLES) & set(os.environ)
