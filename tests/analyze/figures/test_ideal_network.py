"""T_id: the duration of the run on an ideal network, where transfers take no time."""

import random

import pytest
from records import MS, Rank, report_of

from paceline.analyze.figures import measured_window as ideal_network
from paceline.analyze.figures.pop import busy_ns
from paceline.analyze.records.match_collectives import match_collectives
from paceline.analyze.records.state_timeline import build_timeline, find_window
from paceline.record.ring.states import Op, State


def replayed(ranks):
    """Return T_id, the ranks' own times and the window.

    The vectorized and the scalar computation of T_id must agree.
    """
    records = [rank.record() for rank in ranks]
    matched, within = match_collectives(records), find_window(records)
    lines = [
        build_timeline(r, at, within)
        for r, at in zip(records, matched.latest_arrivals(len(records)), strict=True)
    ]
    found = []
    for few in (0, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ideal_network, "MAX_SMALL_GROUP", few)
            found.append(ideal_network.ideal_length(matched, lines, within))
    assert found[0] == found[1]
    return found[0], [busy_ns(line.states) for line in lines], within


def test_ideal_network_removes_only_transfers(tmp_path):
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for rank, (first, second) in zip(ranks, [(30, 10), (10, 30)], strict=True):
        rank.step(0, 100)
        rank.was(State.FORWARD, 100, 100 + first)
        rank.collective(100 + first, 100 + first, 150)  # the last rank arrives at 130
        rank.was(State.FORWARD, 150, 150 + second)
        rank.collective(150 + second, 150 + second, 200)  # the last rank arrives at 180
        rank.step(100, 200)
    ideal, times, _ = replayed(ranks)
    assert times == [40 * MS, 40 * MS]
    assert ideal == 60 * MS  # each rank waits 20 ms for the other one
    e = report_of(ranks).efficiencies
    assert e.serialisation == pytest.approx(40 / 60)
    assert e.transfer == pytest.approx(60 / 100)
    assert e.load_balance == pytest.approx(1)


def test_chain_of_messages_is_serialisation(tmp_path):
    """Each rank receives, computes and sends on.

    As in OTF-CPT's test mpi-serialization.c, whose authors expect SerE = 1/N, TE = 1 and LB = 1:
    Protze et al., Euro-Par 2022.
    """
    size = 4
    ranks = [Rank(tmp_path, rank, size) for rank in range(size)]
    for i, rank in enumerate(ranks):
        rank.step(0, 100)
        begin = 100 + 20 * i
        if i:
            rank.message(100, 100, begin, Op.RECV, i - 1, number=1)
        rank.was(State.FORWARD, begin, begin + 20)
        if i < size - 1:
            rank.message(begin + 20, begin + 20, begin + 20, Op.SEND, i + 1, number=1)
        rank.collective(begin + 20, begin + 20, 180)
        rank.step(100, 180)
    e = report_of(ranks).efficiencies
    assert e.parallel == pytest.approx(1 / size)
    assert e.load_balance == pytest.approx(1)
    assert e.serialisation == pytest.approx(1 / size)
    assert e.transfer == pytest.approx(1)


def test_delay_propagates_between_process_groups(tmp_path):
    """Rank 0 is late for rank 1 in one group, which makes rank 1 late for rank 2 in another."""
    members = [{"a": (2, 0)}, {"a": (2, 1), "b": (2, 0)}, {"b": (2, 1)}]
    ranks = [Rank(tmp_path, i, 3, groups=groups) for i, groups in enumerate(members)]
    for rank in ranks:
        rank.step(0, 1)
    ranks[0].was(State.FORWARD, 1, 51)
    ranks[0].collective(51, 51, 61, group="a")
    ranks[1].was(State.FORWARD, 1, 11)
    ranks[1].collective(11, 11, 61, group="a")
    ranks[1].collective(61, 61, 71, group="b")
    ranks[2].was(State.FORWARD, 1, 6)
    ranks[2].collective(6, 6, 71, group="b")
    for rank in ranks:
        rank.step(1, 71)
    ideal, times, _ = replayed(ranks)
    assert times == [60 * MS, 10 * MS, 5 * MS]
    assert ideal == 60 * MS


@pytest.mark.parametrize("seed", range(10))
def test_ideal_time_is_between_longest_rank_and_run_time(tmp_path, seed):
    """Simulate random runs: max(b) <= T_id <= T, and T_id = T without transfers."""
    draw = random.Random(seed)
    size, steps = 4, 30
    for transfer in (0.0, 3.0):
        ranks = [Rank(tmp_path, rank, size) for rank in range(size)]
        at = [0.0] * size
        for step in range(steps):
            launched = []
            for i in range(size):
                launched.append(at[i] + draw.uniform(1, 10))
                at[i] = launched[i] + draw.uniform(0, 4)  # overlaps the collective
            done = max(launched) + transfer * draw.random()
            for i, rank in enumerate(ranks):
                end = max(at[i], done)
                rank.collective(launched[i], at[i], end)
                rank.step(end, end, number=step)
                at[i] = end
        last = max(at)
        for i, rank in enumerate(ranks):
            rank.was(State.OPTIMIZER, at[i], last)
        ideal, times, within = replayed(ranks)
        assert max(times) <= ideal <= within.length
        if transfer == 0.0:
            assert ideal == pytest.approx(within.length, abs=100)


def test_collective_ends_before_required_starts_are_reported(tmp_path):
    """With one clock, no rank can leave an all-reduce before the last rank has entered it."""
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for rank, arrival in zip(ranks, (10, 90), strict=True):
        rank.step(0, 1)
        rank.collective(arrival, arrival, arrival + 5)
        rank.was(State.FORWARD, arrival + 5, arrival + 10)
        rank.was(State.OPTIMIZER, 100, 101)
        rank.step(1, 101)
    report = report_of(ranks)
    assert report.efficiencies.serialisation is None
    assert report.efficiencies.transfer is None
    assert "takes longer than the run" in " ".join(report.doubts)
