"""Simulation of the steps of every algorithm on any number of hosts."""

import random
from itertools import pairwise

import pytest

from paceline.comm.hosts import schedules
from paceline.comm.hosts.schedules import (
    ALL_REDUCE,
    LinkModel,
    Step,
    cheapest_algorithm,
    cost,
    cut_parts,
)

HOSTS = (2, 3, 4, 5, 6, 7, 8, 13)
NBYTES = 1000


class Host:
    def __init__(self, me: int, steps: list[Step]) -> None:
        self.me, self.steps = me, steps
        # For each byte: the hosts whose bytes are summed up in it, and how often each.
        self.bytes = [{me: 1} for _ in range(NBYTES)]


def play(hosts: list[Host]) -> None:
    """Run the steps of all hosts, in random order; fail if the hosts wait for each other."""
    sent: dict[tuple[int, int], list[list[dict]]] = {}
    begun, order = [False] * len(hosts), random.Random(1)
    while any(host.steps for host in hosts):
        moved = False
        for host in order.sample(hosts, len(hosts)):
            if not host.steps:
                continue
            step = host.steps[0]
            if not begun[host.me]:
                for to, at, count in step.sends:
                    part = [dict(one) for one in host.bytes[at : at + count]]
                    sent.setdefault((host.me, to), []).append(part)
                begun[host.me] = moved = True
            if all(sent.get((of, host.me)) for of, _, _ in step.receives):
                for of, at, count in step.receives:
                    part = sent[of, host.me].pop(0)
                    assert len(part) == count, "sender and receiver do not mean the same"
                    for i, one in enumerate(part, at):
                        before = host.bytes[i] if step.fold else {}
                        host.bytes[i] = {
                            who: one.get(who, 0) + before.get(who, 0) for who in {*one, *before}
                        }
                host.steps.pop(0)
                begun[host.me], moved = False, True
        assert moved, "hosts wait for each other"
    assert not any(sent.values()), "something was sent that nobody has taken"


def everything(size: int) -> dict[int, int]:
    return dict.fromkeys(range(size), 1)


@pytest.mark.parametrize("size", HOSTS)
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_schedule_sums_all_hosts(name, size):
    hosts = [Host(me, list(ALL_REDUCE[name](NBYTES, me, size))) for me in range(size)]
    play(hosts)
    assert all(one == everything(size) for host in hosts for one in host.bytes)


RACKS = [(2, 2), (2, 3), (3, 2), (4, 2), (2, 10), (10, 2)]


@pytest.mark.parametrize(("count", "each"), RACKS)
def test_racks_schedule_minimizes_traffic_between_racks(count, each):
    """At most twice the amount that a ring of R racks sends: (R - 1) / R of the vector."""
    size = count * each
    steps = [list(schedules.racks(NBYTES, me, size, each)) for me in range(size)]
    leaves = [
        sum(
            nbytes
            for me in range(rack * each, (rack + 1) * each)
            for step in steps[me]
            for to, _, nbytes in step.sends
            if to // each != rack
        )
        for rack in range(count)
    ]
    rounding = 2 * 64 * each * count
    assert max(leaves) <= 2 * NBYTES * (count - 1) / count + rounding
    hosts = [Host(me, of_one) for me, of_one in enumerate(steps)]
    play(hosts)
    assert all(one == everything(size) for host in hosts for one in host.bytes)


@pytest.mark.parametrize("size", HOSTS)
@pytest.mark.parametrize("name", ["ring", "direct"])
def test_reduce_scatter_and_all_gather_schedules(name, size):
    cuts = cut_parts(NBYTES, size)
    scatter, gather = (getattr(schedules, f"{name}_{half}") for half in ("scatter", "gather"))
    hosts = [Host(me, list(scatter(cuts, me, size))) for me in range(size)]
    play(hosts)
    for host in hosts:
        own = host.bytes[cuts[host.me] : cuts[host.me + 1]]
        assert all(one == everything(size) for one in own)
    hosts = [Host(me, list(gather(cuts, me, size))) for me in range(size)]
    play(hosts)
    for host in hosts:
        for of in range(size):
            assert all(one == {of: 1} for one in host.bytes[cuts[of] : cuts[of + 1]])


@pytest.mark.parametrize("size", HOSTS)
def test_broadcast_schedule_from_any_root(size):
    for root in range(size):
        steps = [list(schedules.broadcast(NBYTES, me, size, root)) for me in range(size)]
        hosts = [Host(me, of_one) for me, of_one in enumerate(steps)]
        play(hosts)
        assert all(one == {root: 1} for host in hosts for one in host.bytes)


def test_cut_parts_covers_vector_at_cache_line_boundaries():
    for nbytes in (0, 1, 63, 64, 65, 1000, 4096):
        for parts in (1, 2, 3, 7):
            cuts = cut_parts(nbytes, parts)
            assert (cuts[0], cuts[-1], len(cuts)) == (0, nbytes, parts + 1)
            assert all(a <= b and (a % 64 == 0 or a == nbytes) for a, b in pairwise(cuts))


def test_cheapest_algorithm_is_selected():
    """Check the choice against the formulas in the module's docstring."""
    link = LinkModel(latency_s=50e-6, bytes_per_s=1e8)
    assert cheapest_algorithm(8, 16, link) == "doubling"
    assert cheapest_algorithm(8, 13, link) == "doubling"
    assert cheapest_algorithm(100_000_000, 128, link) == "halving"  # 14 steps, a ring takes 254
    assert cheapest_algorithm(100_000_000, 16, link) == "ring"  # its connections are never idle
    assert cheapest_algorithm(100_000_000, 13, link) == "ring"
    assert cheapest_algorithm(1_000_000, 2, link) == "doubling"
    assert cheapest_algorithm(30_000, 4, link) == "direct"
    assert cheapest_algorithm(8, 8, link, hosts_per_rack=4) == "doubling"
    assert cheapest_algorithm(300_000, 64, link, hosts_per_rack=8) == "racks"
    assert cheapest_algorithm(100_000_000, 16, link, hosts_per_rack=4) == "ring"
    ring = ALL_REDUCE["ring"](16_000_000, 0, 16)
    assert cost(ring, link) == pytest.approx(30 * (50e-6 + 1e6 / 1e8))
