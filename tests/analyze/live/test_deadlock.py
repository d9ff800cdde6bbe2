"""Which ranks wait in a collective that can't complete, from hand-made records of ranks."""

import pytest
from records import MS, Rank

from paceline.analyze.live.live_view import find_deadlocked_ranks, view
from paceline.record.ring.ring import LAST_BEGUN, LAST_BEGUN_OFFSET
from paceline.record.ring.states import Op, State
from paceline.record.ring.tail import Tail, read_tail
from paceline.report.terminal.top import find_computing_ranks

SLEEPS = None  # a rank that is in no collective


def deadlocked(folder, waits, *, stopped=(), ended=(), silent=(), size=3):
    """Return the deadlocked ranks. ``waits``: by rank, the (group, number, op) it waits in."""
    tails = []
    for number, wait in waits.items():
        rank = Rank(folder, number, size, groups={"0": (3, number), "pair": (3, number)})
        rank.was(State.FORWARD, 0, 6)
        if wait is not SLEEPS:
            group, seq, op = wait
            place = (rank.ring._map, LAST_BEGUN_OFFSET)
            LAST_BEGUN.pack_into(*place, 10 * MS, seq, 0, group, State.BLOCKED, op)
        process = "" if number in ended else "T" if number in stopped else "S"
        tails.append(Tail(rank.path.name, 60_000 * MS, process, read_tail(rank.path, 100)))
    return find_deadlocked_ranks(view(tails, [], size, silent), stopped)


REDUCE, OTHER = (1, 5, Op.ALL_REDUCE), (2, 3, Op.BARRIER)


def test_ranks_that_wait_for_each_other_in_two_groups_are_deadlocked(tmp_path):
    assert deadlocked(tmp_path, {0: REDUCE, 1: OTHER, 2: SLEEPS}) == [0, 1]


def test_ranks_that_wait_for_deadlocked_ranks_are_deadlocked(tmp_path):
    third = (2, 4, Op.BARRIER)
    assert deadlocked(tmp_path, {0: REDUCE, 1: OTHER, 2: third}) == [0, 1, 2]


@pytest.mark.parametrize("waits", [{0: REDUCE, 1: REDUCE, 2: SLEEPS}, {0: REDUCE, 1: REDUCE}])
def test_rank_that_sleeps_or_has_no_record_may_still_arrive(tmp_path, waits):
    assert deadlocked(tmp_path, waits) == []


@pytest.mark.parametrize(
    "fault", [{"ended": [2]}, {"stopped": [2]}], ids=["rank exited", "rank stopped"]
)
def test_rank_that_exited_or_is_stopped_does_not_arrive(tmp_path, fault):
    assert deadlocked(tmp_path, {0: REDUCE, 1: REDUCE, 2: SLEEPS}, **fault) == [0, 1]


def test_ranks_on_host_that_does_not_answer_do_not_arrive(tmp_path):
    assert deadlocked(tmp_path, {0: REDUCE, 1: REDUCE}, silent=["host2"]) == [0, 1]


def test_stopped_rank_blocks_collective_that_it_has_begun(tmp_path):
    waits = dict.fromkeys(range(3), REDUCE)
    assert deadlocked(tmp_path, waits) == []  # all are in it: it may be slow
    assert deadlocked(tmp_path, waits, stopped=[2]) == [0, 1, 2]


def test_ranks_in_different_collectives_of_one_number_are_deadlocked(tmp_path):
    other = (1, 5, Op.BARRIER)
    assert deadlocked(tmp_path, {0: REDUCE, 1: other, 2: SLEEPS}) == [0, 1]


def test_members_of_broadcast_wait_for_its_root_only(tmp_path):
    broadcast = (1, 5, Op.BROADCAST)
    waits = {0: SLEEPS, 1: broadcast, 2: OTHER}  # rank 0 may be the root; rank 2 waits for rank 1
    assert deadlocked(tmp_path, waits) == []
    assert deadlocked(tmp_path, waits, ended=[0]) == [1, 2]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_rank_whose_gpu_waits_is_in_the_collective_that_others_have_not_launched(tmp_path, device):
    """For the host it ended when it was launched: the rank waits where it reads a value."""
    tails = []
    for number, launched in enumerate((5, 3)):
        rank = Rank(tmp_path, number, 2, device=device)
        for at in range(launched):
            rank.collective(at, at, at + 0.1)
        tails.append(Tail(rank.path.name, 60_000 * MS, "R", read_tail(rank.path, 100)))
    found = view(tails, [], 2)
    first, second = found.now
    assert second.doing == "starting"
    if device == "cpu":
        assert not found.standing
        return
    assert (first.doing, first.collective, first.number) == ("exchange", "all-reduce", 4)
    (blocked,) = found.standing
    assert (blocked.number, blocked.inside, blocked.absent) == (4, [0], [1])
    assert find_computing_ranks(found, {0, 1}) == [1]  # rank 0 spins in CUDA, and does not compute
    assert find_deadlocked_ranks(found) == []
    assert find_deadlocked_ranks(found, [1]) == [0]
