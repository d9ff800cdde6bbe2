"""Step times, outlier steps with their causes, and waits between ranks, from hand-made records."""

import pytest
from records import Rank, report_of

from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.records.load_run import Run
from paceline.record.ring.states import State


def job(folder, longer=None, ranks=3, steps=30, late=None, state=State.FORWARD):
    """Return the report of steps of 20 ms with an all-reduce of 2 ms.

    longer: step -> extra ms; late: the ranks that spend them in ``state`` (None: all ranks).
    """
    made = []
    for i in range(ranks):
        rank = Rank(folder, i, ranks)
        rank.step(0, 10)
        begin = 10
        for step in range(1, steps + 1):
            more = (longer or {}).get(step, 0)
            mine = more if late is None or i in late else 0
            rank.was(State.FORWARD, begin, begin + 18)
            rank.was(state, begin + 18, begin + 18 + mine)
            rank.collective(begin + 18 + mine, begin + 18 + mine, begin + 20 + more)
            rank.step(begin, begin + 20 + more, samples=1, number=step)
            begin += 20 + more
        made.append(rank)
    return report_of(made)


def test_equal_steps_have_no_outliers(tmp_path):
    times = job(tmp_path).step_times
    assert (times.first, times.last) == (1, 30)
    assert times.median_s == times.p5_s == times.p95_s == pytest.approx(0.02)
    assert times.outlier_count == 0


@pytest.mark.parametrize(
    ("state", "late", "told"),
    [
        (State.FORWARD, [1], ("useful", 1)),
        (State.INPUT, [2], ("input", 2)),
        (State.VALIDATION, [0], ("validation", 0)),
        (State.CHECKPOINT, None, ("checkpoint", None)),
    ],
)
def test_outlier_step_is_attributed_to_longer_state(tmp_path, state, late, told):
    report = job(tmp_path, {7: 100, 20: 60}, late=late, state=state)
    found = report.step_times.outliers
    assert [one.step for one in found] == [7, 20]
    assert [(one.state, one.rank) for one in found] == [told] * 2
    assert [one.seconds for one in found] == [pytest.approx(0.12), pytest.approx(0.08)]
    assert [one.longer_s for one in found] == [pytest.approx(0.1), pytest.approx(0.06)]
    assert report.step_times.worst == 7


def test_outlier_step_with_long_exchange_is_transfer(tmp_path):
    made = []
    for i in range(2):
        rank = Rank(tmp_path, i, 2)
        rank.step(0, 10)
        for step in range(1, 21):
            begin = 10 + 20 * (step - 1) + (50 if step > 9 else 0)
            end = begin + 20 + (50 if step == 9 else 0)
            rank.was(State.FORWARD, begin, begin + 18)
            rank.collective(begin + 18, begin + 18, end)
            rank.step(begin, end, number=step)
        made.append(rank)
    (one,) = report_of(made).step_times.outliers
    assert (one.step, one.state, one.rank) == (9, "transfer", None)


def test_waits_between_ranks_add_up_to_wait_time(tmp_path):
    report = job(tmp_path, dict.fromkeys(range(1, 31), 5), late=[1])
    pairs = {(one.rank, one.waited_for): one.share for one in report.waited_for}
    assert pairs.keys() == {(0, 1), (2, 1)}
    for rank in (0, 2):
        assert pairs[rank, 1] == pytest.approx(report.states[rank]["wait"])
    assert report.states[1]["wait"] == 0


def test_collectives_of_one_group_have_separate_shares(tmp_path):
    from paceline.record.ring.states import Op

    made = []
    for i in range(2):
        rank = Rank(tmp_path, i, 2)
        rank.step(0, 10)
        for step in range(1, 11):
            begin = 10 + 40 * (step - 1)
            rank.was(State.FORWARD, begin, begin + 20)
            start = begin + 20 + (4 if i else 0)
            rank.collective(start, start, begin + 30)
            rank.collective(begin + 30, begin + 30, begin + 36, op=Op.ALL_GATHER)
            rank.step(begin, begin + 40, number=step)
        made.append(rank)
    (group,) = report_of(made).groups
    by_name = {one.name: one for one in group.collectives}
    assert by_name["all-reduce"].wait == pytest.approx(4 / 40 / 2)
    assert by_name["all-reduce"].transfer == pytest.approx(6 / 40)
    assert by_name["all-gather"].wait == 0
    assert by_name["all-gather"].transfer == pytest.approx(6 / 40)
    assert group.wait == pytest.approx(sum(one.wait for one in group.collectives))
    assert group.transfer == pytest.approx(sum(one.transfer for one in group.collectives))


def test_ranks_with_equal_placement_are_grouped(tmp_path):
    facts = {"cores": "f0f", "threads": 4, "torch": "2.13", "paceline": "1", "python": "3.12"}
    made = [Rank(tmp_path, i, 3, host=f"h{i // 2}", clock="one", **facts) for i in range(3)]
    for rank in made:
        rank.step(0, 10)
    first, second = report_of(made).places
    assert (first.host, first.ranks, first.cores, first.threads) == ("h0", "0-1", "0-3,8-11", 4)
    assert (second.host, second.ranks, second.device) == ("h1", "2", None)


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        (range(1, 41), "in all its steps"),
        (set(range(1, 41)) - {7, 20}, "in nearly all its steps (38 of 40)"),
        (set(range(1, 41)) - {3, 7, 12, 20, 30, 33}, "in 34 of 40 steps"),
        (range(21, 41), "from step 21 on"),
    ],
)
def test_lateness_is_in_all_steps_only_where_it_is(tmp_path, slow, words):
    from paceline.analyze.diagnosis.lateness import lateness

    made = []
    for i in range(3):
        rank = Rank(tmp_path, i, 3)
        rank.step(0, 10)
        for step in range(1, 41):
            begin = 10 + 40 * (step - 1)
            arrived = begin + (30 if i == 1 and step in slow else 20)
            rank.was(State.FORWARD, begin, arrived)
            rank.collective(arrived, arrived, begin + 40)
            rank.step(begin, begin + 40, number=step)
        made.append(rank)
    records = [rank.record() for rank in made]
    m = analyse_with_window(Run("test", records, missing=[])).measured
    assert lateness(m, 1) == words
