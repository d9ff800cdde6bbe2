"""Choice of the addresses by which hosts reach each other, tested on this machine's addresses."""

import socket
from contextlib import ExitStack

import pytest

from paceline.cluster.topology.network_interfaces import Link, network_links
from paceline.comm import reachable_address
from paceline.comm.reachable_address import Listener, choose, listen_on, others_of, try_all


@pytest.fixture
def host():
    """Yield a function that creates hosts, which listen on given addresses of this machine."""
    with ExitStack() as stack:

        def made(*addresses):
            listener = Listener(only="no such interface")
            assert listener.sockets == {}
            for number, address in enumerate(addresses):
                listener.sockets[Link(f"net{number}", address)] = listen_on(address)
            stack.callback(listener.close)
            return listener

        yield made


def test_host_offers_all_addresses_except_loopback():
    listener = Listener()
    try:
        offered = [Link(name, address, speed) for name, address, speed, _ in links_of(listener)]
        assert offered == network_links()
        assert "lo" not in {link.interface for link in offered}
        assert try_all({0: listener.offer()}, listener) == {
            0: {link.address: "" for link in offered}
        }
        names = {link.interface for link in offered}
    finally:
        listener.close()
    for name in names:  # same patterns as in gloo and NCCL
        assert name in interfaces(only=f"another,{name}")
        assert name in interfaces(only=name[:-1])  # a prefix of the name
        assert name in interfaces(only=f"={name}")
        assert name not in interfaces(only=f"={name[:-1]}")
        assert name not in interfaces(only=f"^{name[:-1]}")
        assert name in interfaces(only=f"^={name[:-1]}")
        assert name in interfaces(only="^docker,lo")


def interfaces(only):
    listener = Listener(only)
    found = {link.interface for link in listener.sockets}
    listener.close()
    return found


def links_of(listener):
    return listener.offer()["links"]


def test_host_is_reached_by_all_addresses_with_its_token(host):
    first, second = host("127.0.0.1", "127.0.0.2"), host("127.0.0.1", "::1")
    assert try_all({4: first.offer()}, first) == {4: {"127.0.0.1": "", "127.0.0.2": ""}}
    assert try_all({1: second.offer()}, second) == {1: {"127.0.0.1": "", "::1": ""}}


def test_different_host_with_same_address_is_detected(host):
    """The private address of a bridge can exist on every host."""
    meant, other = host("127.0.0.1"), host("127.0.0.1")
    offer = {**meant.offer(), "links": links_of(other)}
    assert try_all({1: offer}, other) == {1: {"127.0.0.1": "another host has this address as well"}}


def test_unreachable_address_is_reported_with_reason(host):
    gone = host("127.0.0.1")
    offer = gone.offer()
    gone.close()
    offer["links"].append(["net1", "255.255.255.255", 0, 1])
    ((host_, said),) = try_all({7: offer}).items()
    assert host_ == 7
    assert said["127.0.0.1"] == "Connection refused"
    assert said["255.255.255.255"] not in ("", None)


def test_silent_address_times_out_without_blocking_others(host, monkeypatch):
    monkeypatch.setattr(reachable_address, "SECONDS", 1.0)
    silent, heard = host("127.0.0.3"), host("127.0.0.1")
    assert try_all({0: silent.offer(), 1: heard.offer()}, heard) == {
        0: {"127.0.0.3": "no answer in 1 s"},
        1: {"127.0.0.1": ""},
    }


def test_listener_on_loopback_is_local_only(host):
    listener = host("127.0.0.1")
    (listening,) = listener.sockets.values()
    assert listening.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError, match="in use"):
        listen_on("127.0.0.1", listening.getsockname()[1])
    with socket.create_connection(listening.getsockname()) as visitor:
        listener.answer(listening)
        assert visitor.recv(100) == listener.token
        assert visitor.recv(100) == b""
    listener.answer(listening)  # the visitor has already disconnected


@pytest.mark.parametrize(
    ("me", "size", "others"),
    [
        (0, 1, []),
        (0, 2, [1]),
        (1, 2, [0]),
        (2, 5, [0, 1, 3, 4]),
        (0, 100, list(range(1, 17))),
        (50, 100, [0, *range(51, 67)]),
        (99, 100, list(range(16))),
    ],
)
def test_each_host_tries_all_others_or_a_subset_in_large_job(me, size, others):
    assert others_of(me, size) == others


@pytest.mark.parametrize("size", [2, 5, 17, 18, 100])
def test_every_host_is_tried_by_several_and_first_host_by_all(size):
    tried = [other for me in range(size) for other in others_of(me, size)]
    assert all(tried.count(other) >= min(16, size - 1) for other in range(size))
    assert tried.count(0) == size - 1


def offer(*pairs):
    return {"token": "", "links": [[name, address, 0, 1] for name, address in pairs]}


def test_first_address_reached_by_all_others_is_selected():
    offers = [
        offer(("ib0", "10.1.0.1"), ("eth0", "10.0.0.1")),
        offer(("ib0", "10.1.0.2"), ("eth0", "10.0.0.2")),
        offer(("eth9", "10.0.0.3")),
    ]
    tried = {
        0: {1: {"10.1.0.2": "", "10.0.0.2": ""}, 2: {"10.0.0.3": ""}},
        1: {0: {"10.1.0.1": "", "10.0.0.1": ""}, 2: {"10.0.0.3": ""}},
        2: {
            0: {"10.1.0.1": "No route to host", "10.0.0.1": ""},
            1: {"10.1.0.2": "", "10.0.0.2": ""},
        },
    }
    assert choose(["a", "b", "c"], offers, tried) == [
        ("eth0", "10.0.0.1"),
        ("ib0", "10.1.0.2"),
        ("eth9", "10.0.0.3"),
    ]
    # b did not try to reach a: in a large job, each host tries only some of the others.
    del tried[1][0], tried[2][0]["10.1.0.1"]
    assert choose(["a", "b", "c"], offers, tried)[0] == ("eth0", "10.0.0.1")


def test_unreachable_host_is_reported_with_tried_addresses():
    offers = [offer(("eth0", "10.0.0.1")), offer(("eth0", "10.0.0.2"), ("eth1", "10.78.0.2"))]
    tried = {
        0: {1: {"10.0.0.2": "No route to host", "10.78.0.2": "no answer in 3 s"}},
        1: {0: {"10.0.0.1": ""}},
    }
    with pytest.raises(ValueError, match="host2") as raised:
        choose(["host1", "host2"], offers, tried)
    assert str(raised.value) == (
        "host2 can't be reached by the other hosts. Tried:\n"
        "    from host1: eth0 10.0.0.2: No route to host\n"
        "    from host1: eth1 10.78.0.2: no answer in 3 s\n"
        "HINT: open the firewall between these hosts, or select an interface: "
        "GLOO_SOCKET_IFNAME=NAME"
    )


def test_host_without_network_interface_is_reported():
    with pytest.raises(ValueError, match=r"b can't be reached[^§]*no network interface that is up"):
        choose(["a", "b"], [offer(("eth0", "10.0.0.1")), offer()], {1: {0: {"10.0.0.1": ""}}})
