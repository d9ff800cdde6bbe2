"""Records with known answers: states add up, waits are attributed to the latest member."""

import random

import numpy as np
import pytest
from records import MS, Rank, report_of

from paceline.analyze.figures.pop import LOSSES, busy_ns, efficiencies
from paceline.analyze.records.match_collectives import match_collectives
from paceline.analyze.records.state_timeline import (
    STATES,
    Window,
    build_timeline,
    find_window,
    merge_intervals,
)
from paceline.record.ring.states import Op, State


def covered(start, end, within):
    start, end = merge_intervals(start, end, within)
    return int((end - start).sum())


def latest_starts(records):
    matched = match_collectives(records)
    return matched.latest_arrivals(len(records)), matched.count_unmatched()


def states(record, latest, within):
    return build_timeline(record, latest, within).states


@pytest.fixture
def two(tmp_path):
    """Two ranks in a window of 100 ms; rank 1 computes longer and rank 0 waits for it."""
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for rank, (input_ms, compute_ms) in zip(ranks, [(5, 35), (5, 65)], strict=True):
        rank.step(0, 100)
        arrived = 100 + input_ms + compute_ms
        rank.was(State.INPUT, 100, 100 + input_ms)
        rank.was(State.FORWARD, 100 + input_ms, arrived)
        rank.collective(arrived, arrived, 190)
        rank.was(State.OPTIMIZER, 190, 200)
        rank.step(100, 200, samples=8)
    return ranks


def test_wait_ends_and_transfer_starts_when_last_rank_arrives(two):
    records = [rank.record() for rank in two]
    latest, unmatched = latest_starts(records)
    within = find_window(records)
    assert within == Window(100 * MS, 200 * MS)
    assert unmatched == 0
    first, second = (states(r, at, within) for r, at in zip(records, latest, strict=True))
    assert first["wait"] == 30 * MS
    assert first["transfer"] == 20 * MS
    assert second["wait"] == 0
    assert second["transfer"] == 20 * MS
    assert (first["useful"], second["useful"]) == (45 * MS, 75 * MS)
    assert first["input"] == second["input"] == 5 * MS


def test_efficiencies_follow_their_definitions(two):
    summary = report_of(two)
    e = summary.efficiencies
    # busy time of the ranks: 50 and 80 of 100 ms
    assert e.load_balance == pytest.approx(65 / 80)
    assert e.communication == pytest.approx(80 / 100)
    assert e.parallel == pytest.approx(e.load_balance * e.communication)
    assert e.input == pytest.approx(60 / 65)
    assert e.useful == pytest.approx(0.60)
    assert summary.slowest_rank == 1
    assert summary.slowest_excess == pytest.approx(80 / 65 - 1)
    assert summary.samples_per_s == pytest.approx(16 / 0.1)


@pytest.mark.parametrize("seed", range(20))
def test_states_add_up_to_window(tmp_path, seed):
    draw = random.Random(seed)
    ranks = [Rank(tmp_path, rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.step(0, 10)
        for _ in range(200):  # events overlap in every way
            start = draw.uniform(0, 1000)
            kind = draw.choice([s for s in State if s not in (State.STEP, State.COLLECTIVE)])
            if kind == State.BLOCKED:
                rank.collective(start, start + draw.uniform(0, 5), start + draw.uniform(5, 30))
            else:
                rank.was(kind, start, start + draw.uniform(0, 50))
        rank.step(10, 1000)
    records = [rank.record() for rank in ranks]
    within = find_window(records)
    latest, _ = latest_starts(records)
    all_states = [states(r, at, within) for r, at in zip(records, latest, strict=True)]
    for rank in all_states:
        assert set(rank) == set(STATES)
        assert all(time >= 0 for time in rank.values())
        assert sum(rank.values()) == within.length
    e = efficiencies(all_states, within.length)
    product = e.parallel
    for name in LOSSES:
        assert 0 <= getattr(e, name) <= 1
        product *= getattr(e, name)
    useful = sum(rank["useful"] for rank in all_states) / 3 / within.length
    assert product == pytest.approx(useful)
    assert e.useful == pytest.approx(useful)
    assert e.parallel == pytest.approx(sum(map(busy_ns, all_states)) / 3 / within.length)


def test_overlapped_exchange_has_no_cost(tmp_path):
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.step(0, 1)
        rank.was(State.BACKWARD, 1, 50)
        rank.collective(launched=10, blocked=50, end=50)
        rank.step(1, 51)
    summary = report_of(ranks)
    assert all(rank["wait"] == rank["transfer"] == 0 for rank in summary.states)


def test_input_and_forward_during_validation_are_validation(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.step(0, 10)
    rank.was(State.INPUT, 20, 30)
    rank.was(State.FORWARD, 30, 40)
    rank.was(State.VALIDATION, 20, 60)
    rank.was(State.CHECKPOINT, 50, 60)
    rank.step(10, 110)
    share = report_of([rank]).states[0]
    assert share == pytest.approx(
        dict.fromkeys(STATES, 0.0) | {"validation": 0.3, "checkpoint": 0.1, "other": 0.6}
    )


def test_broadcast_receivers_wait_only_for_root(tmp_path):
    ranks = [Rank(tmp_path, rank, 3) for rank in range(3)]
    for rank, arrival in zip(ranks, (30, 10, 50), strict=True):  # rank 0 is the root
        rank.step(0, 1)
        rank.collective(arrival, arrival, 60, op=Op.BROADCAST, peer=0)
        rank.step(1, 101)
    records = [rank.record() for rank in ranks]
    latest, _ = latest_starts(records)
    within = find_window(records)
    waits = [states(r, at, within)["wait"] for r, at in zip(records, latest, strict=True)]
    assert waits == [0, 20 * MS, 0]


def test_process_groups_are_matched_by_name(tmp_path):
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for rank, name in zip(ranks, ("3", "4"), strict=True):
        rank.ring.describe(
            {
                "rank": 0,
                "size": 2,
                "host": "h",
                "started_ns": 0,
                "groups": {"1": {"name": name, "size": 1, "rank": 0}},
            }
        )
    ranks[0].collective(10, 10, 20)
    ranks[1].collective(90, 90, 95)
    latest, unmatched = latest_starts([rank.record() for rank in ranks])
    assert [list(row) for row in latest] == [[10 * MS], [90 * MS]]
    assert unmatched == 0


def test_unmatched_collective_is_counted(two):
    two[0].collective(195, 195, 199)
    _, unmatched = latest_starts([rank.record() for rank in two])
    assert unmatched == 1


def test_one_step_gives_no_measurement_window(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.step(0, 10, samples=4)
    summary = report_of([rank])
    assert summary.window_s is None
    assert summary.samples_per_s is None
    assert summary.states == []


def test_interval_union_is_clipped_and_counts_overlaps_once():
    start = np.array([0, 5, 20, 21, 90])
    end = np.array([10, 8, 30, 40, 200])
    assert covered(start, end, Window(2, 100)) == 8 + 20 + 10
    assert covered(start, end, Window(300, 400)) == 0
