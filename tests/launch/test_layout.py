"""Placement of ranks on hosts."""

import pytest

from paceline.cluster.schedulers.hostfile import Host
from paceline.launch.layout import Seat, default_ranks, format_layout, make_seats, ranks_per_host


def test_ranks_of_host_are_consecutive():
    assert make_seats([2, 1]) == [Seat(0, 0, 2), Seat(0, 1, 2), Seat(1, 0, 1)]
    assert make_seats([0, 2]) == [Seat(1, 0, 2), Seat(1, 1, 2)]


@pytest.mark.parametrize(
    ("host", "ranks"),
    [
        (Host("a", slots=8, devices=4, numa=2), 4),
        (Host("a", slots=8, devices=0, numa=2), 8),
        (Host("a", numa=2), 2),
        (Host("a", cpus=64), 1),
    ],
    ids=["GPUs", "tasks", "NUMA domains", "nothing known"],
)
def test_default_ranks_per_host_from_gpus_tasks_or_numa_domains(host, ranks):
    assert default_ranks(host) == ranks
    assert ranks_per_host([host, host], None, explicit=False) == [ranks, ranks]


def test_explicit_slots_precede_gpus_and_are_filled_in_order():
    hosts = [Host("a", slots=2, devices=8), Host("b", slots=3), Host("c", slots=1)]
    assert ranks_per_host(hosts, None, explicit=True) == [2, 3, 1]
    assert ranks_per_host(hosts, 6, explicit=True) == [2, 3, 1]
    assert ranks_per_host(hosts, 3, explicit=True) == [2, 1, 0]


def test_implicit_slots_are_no_limit_and_ranks_are_spread_evenly():
    hosts = [Host("a", slots=1), Host("b", slots=1), Host("c", slots=1)]
    assert ranks_per_host(hosts, 8, explicit=False) == [3, 3, 2]
    assert ranks_per_host(hosts, 2, explicit=False) == [1, 1, 0]
    # -H a,b,c: host names without slots
    assert ranks_per_host([Host("a"), Host("b")], 3, explicit=True) == [2, 1]
    assert ranks_per_host([Host("a", devices=4), Host("b", devices=2)], None, explicit=True) == [
        4,
        2,
    ]


def test_more_ranks_than_slots_or_zero_ranks_are_rejected():
    hosts = [Host("a", slots=2), Host("b", slots=3)]
    with pytest.raises(
        ValueError,
        match=r"-n 6: 6 ranks need .*, and the nodes have 5 slots \(a:2, b:3\)\. HINT: -n 5",
    ):
        ranks_per_host(hosts, 6, explicit=True)
    for explicit in (True, False):
        with pytest.raises(ValueError, match="-n 0: at least one rank is needed"):
            ranks_per_host(hosts, 0, explicit)
    many = [Host(f"n{i}", slots=1) for i in range(20)]
    with pytest.raises(ValueError, match=r"n7:1, \.\.\.\)"):
        ranks_per_host(many, 21, explicit=True)


def test_layout_is_formatted_in_one_line():
    assert format_layout(["a", "b"], [4, 4]) == "a: 0-3, b: 4-7"
    assert format_layout(["a", "b", "c"], [1, 0, 2]) == "a: 0, c: 1-2"
    text = format_layout([f"n{i}" for i in range(100)], [2] * 100)
    assert text == (
        "n0: 0-1, n1: 2-3, n2: 4-5, n3: 6-7, ... 94 more ..., n98: 196-197, n99: 198-199"
    )
