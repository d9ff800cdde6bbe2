"""Which ranks are rehearsed, and which of their calls do not fit together."""

import pytest

from paceline.analyze.rehearsal.axis_traffic import axis_links, axis_traffic
from paceline.analyze.rehearsal.facts import (
    Call,
    GroupFacts,
    HostFacts,
    RankFacts,
    Rehearsal,
    RehearsalRequest,
    representatives,
)
from paceline.analyze.rehearsal.mismatches import find_mismatches
from paceline.record.ring.states import Op


@pytest.mark.parametrize(
    ("size", "axes", "expected"),
    [
        (3, [], [0, 1, 2]),
        (64, [], [0, 1, 32, 63]),
        (512, [("data", 64), ("tensor", 8)], [0, 1, 7, 8, 504, 511]),
        (32, [("stage", 4), ("data", 8)], [0, 1, 7, 8, 16, 24, 31]),
    ],
)
def test_representatives(size, axes, expected):
    assert representatives(size, axes) == expected


def rank(number, *calls, axes=(), steps=2):
    """Return a rank of two groups of the same ranks, "a" and "b"."""
    groups = [GroupFacts(name, name, (0, 1)) for name in "ab"]
    made = [Call(1, "ab".index(group), op, size, peer, "x.py:1") for group, op, size, peer in calls]
    return RankFacts(number, list(axes), groups=groups, calls=made, steps=steps)


ALL_REDUCE = ("a", Op.ALL_REDUCE, 8, -1)
IN_B = ("b", Op.ALL_REDUCE, 8, -1)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ([ALL_REDUCE, IN_B], [IN_B, ALL_REDUCE], ""),  # of groups that are used independently
        ([ALL_REDUCE], [IN_B], "rank 0 calls all-reduce of 8 bytes (x.py:1), and rank 1 does not"),
        ([ALL_REDUCE], [("a", Op.ALL_REDUCE, 4, -1)], "rank 1 calls all-reduce of 4 bytes"),
        ([("a", Op.BROADCAST, 8, 0)], [("a", Op.BROADCAST, 8, 1)], "with root 1"),
        ([("a", Op.ALL_GATHER, 8, -1)], [("a", Op.ALL_GATHER, 4, -1)], ""),  # parts differ
        ([("a", Op.SEND, 8, 1)], [("a", Op.RECV, 8, 0)], ""),
        ([("a", Op.SEND, 8, 1)], [("a", Op.RECV, 4, 0)], "which receives 1 message of 4 bytes"),
        ([("a", Op.SEND, 8, 1)], [], "which receives 0 messages"),
    ],
)
def test_mismatches(first, second, text):
    found = find_mismatches([rank(0, *first), rank(1, *second)])
    assert bool(found) == bool(text)
    assert text in " ".join(found)


def test_a_rank_that_the_rehearsal_has_ended_may_have_called_less():
    assert find_mismatches([rank(0, ALL_REDUCE, steps=1), rank(1)]) == []


def test_a_script_that_ends_before_that_of_another_rank():
    (line,) = find_mismatches([rank(0, ALL_REDUCE, ALL_REDUCE), rank(1, ALL_REDUCE, steps=1)])
    assert "collective 2 of their group: rank 0 calls all-reduce of 8 bytes (x.py:1)" in line
    assert "and rank 1 does not" in line


def test_traffic_and_links():
    ranks = [rank(0, ALL_REDUCE, ALL_REDUCE), rank(1, ALL_REDUCE)]
    (traffic,) = axis_traffic(ranks)
    assert (traffic.axis, traffic.calls, traffic.bytes, traffic.sent) == ("a", 2, 16, 16)
    assert (traffic.ranks, traffic.others) == ([0], {1: 8})
    hosts = [HostFacts("n1", 2), HostFacts("n2", 2)]
    axes = [("data", 2), ("tensor", 2)]
    found = Rehearsal(RehearsalRequest(hosts), [rank(0, axes=axes)])
    links = {one.axis: (one.groups, one.crossing, one.first_crossing) for one in axis_links(found)}
    assert links["data"] == (2, 2, (0, 2))
    assert links["tensor"] == (2, 0, ())
