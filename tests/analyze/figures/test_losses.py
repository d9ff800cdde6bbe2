"""Each wait is attributed to a rank and to what that rank did; shares add up."""

import pytest
from records import MS, Rank, report_of

from paceline.record.ring.states import Op, State


def late(folder, size=3, steps=10, why=State.FORWARD, guilty=1):
    """Return ranks that compute 20 ms a step; rank ``guilty`` does ``why`` for 30 ms more."""
    ranks = [Rank(folder, rank, size, host=f"host{rank}", clock="one") for rank in range(size)]
    for rank in ranks:
        rank.step(0, 100)
    for step in range(steps):
        begin = 100 + step * 60
        for i, rank in enumerate(ranks):
            rank.was(State.FORWARD, begin, begin + 20)
            arrived = begin + 20
            if i == guilty:
                if why is not None:
                    rank.was(why, begin + 20, begin + 50)
                arrived = begin + 50
            rank.collective(arrived, arrived, begin + 60, amount=1 << 20)
            rank.step(begin, begin + 60, number=step + 1, samples=4)
    return ranks


@pytest.mark.parametrize(
    ("why", "doing"),
    [
        (State.FORWARD, "useful"),
        (State.INPUT, "input"),
        (State.VALIDATION, "validation"),
        (State.CHECKPOINT, "checkpoint"),
        (None, "other"),
    ],
)
def test_wait_is_attributed_to_latest_rank_and_its_state(tmp_path, why, doing):
    report = report_of(late(tmp_path, why=why))
    waits = [loss for loss in report.losses if loss.kind == "wait"]
    assert [(w.rank, w.host, w.doing) for w in waits] == [(1, "host1", doing)]
    (wait,) = waits
    assert wait.share == pytest.approx(2 * 30 / 60 / 3)
    assert (wait.collective, wait.group) == ("all-reduce", "0")
    assert sum(rank["wait"] for rank in report.states) / 3 == pytest.approx(wait.share)


def test_losses_add_up_to_non_useful_time(tmp_path):
    for why in (State.FORWARD, State.INPUT, None):
        report = report_of(late(tmp_path, why=why))
        lost = sum(loss.share for loss in report.losses)
        assert lost == pytest.approx(1 - report.efficiencies.useful)


def test_loss_reports_its_steps(tmp_path):
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.step(0, 10)
    for step in range(100):
        begin = 10 + step * 30
        for i, rank in enumerate(ranks):
            arrived = begin + (20 if i == 0 and 40 <= step < 60 else 5)
            rank.was(State.FORWARD, begin, arrived)
            rank.collective(arrived, arrived, begin + 25)
            rank.step(begin, begin + 30, number=step + 1)
    (wait,) = [loss for loss in report_of(ranks).losses if loss.kind == "wait" and loss.rank == 0]
    assert 35 <= wait.steps[0] <= 41
    assert 59 <= wait.steps[1] <= 65


def test_range_of_steps_is_analysed_separately(tmp_path):
    ranks = late(tmp_path, steps=20)
    for rank in ranks:  # then 20 steps without a late rank
        for step in range(20, 40):
            begin = 100 + 20 * 60 + (step - 20) * 30
            rank.was(State.FORWARD, begin, begin + 20)
            rank.collective(begin + 20, begin + 20, begin + 30)
            rank.step(begin, begin + 30, number=step + 1)
    first, second = (report_of(ranks, steps=steps) for steps in ((1, 21), (21, 41)))
    assert first.window_s == pytest.approx(1.2)
    assert second.window_s == pytest.approx(0.6)
    assert first.efficiencies.load_balance == pytest.approx((30 / 50 + 30 / 50 + 1) / 3, abs=0.2)
    assert second.efficiencies.load_balance == pytest.approx(1)
    assert not [loss for loss in second.losses if loss.kind == "wait"]
    with pytest.raises(ValueError, match=r"steps 500:600 were not recorded.*HINT"):
        report_of(ranks, steps=(500, 600))


def test_process_groups_are_analysed_separately(tmp_path):
    """Four ranks in two data groups and two tensor groups; only the tensor groups wait."""
    ranks = []
    for i in range(4):
        groups = {f"data{i % 2}": (2, i // 2), f"tensor{i // 2}": (2, i % 2)}
        ranks.append(Rank(tmp_path, i, 4, groups=groups))
    for i, rank in enumerate(ranks):
        rank.step(0, 1)
        arrived = 11 + 10 * (i % 2)
        rank.was(State.FORWARD, 1, arrived)
        rank.collective(arrived, arrived, 31, group=f"tensor{i // 2}", amount=1 << 20)
        rank.collective(31, 31, 41, group=f"data{i % 2}", op=Op.REDUCE_SCATTER, amount=2 << 20)
        rank.step(1, 41)
    groups = {group.name: group for group in report_of(ranks).groups}
    assert set(groups) == {"data0", "data1", "tensor0", "tensor1"}
    assert groups["tensor0"].ranks == [0, 1]
    assert groups["tensor0"].wait == pytest.approx(10 / 80)
    assert groups["tensor0"].transfer == pytest.approx(20 / 80)
    assert groups["data1"].ranks == [1, 3]
    assert groups["data1"].wait == 0
    assert groups["data1"].transfer == pytest.approx(20 / 80)
    (reduced,) = groups["tensor0"].collectives
    assert (reduced.name, reduced.count, reduced.bytes) == ("all-reduce", 1, 1 << 20)
    assert reduced.busbw == pytest.approx((1 << 20) / (10 * MS))  # the factor for 2 ranks is 1
    (scattered,) = groups["data0"].collectives
    assert scattered.busbw == pytest.approx((2 << 20) / (10 * MS) / 2)


def test_point_to_point_messages_wait_only_for_peer(tmp_path):
    ranks = [Rank(tmp_path, i, 3) for i in range(3)]
    for rank in ranks:
        rank.step(0, 1)
    for number, (sent, received) in enumerate([(21, 11), (31, 41)], start=1):
        ranks[0].message(sent, sent, 45, Op.SEND, 1, number)
        ranks[1].message(received, received, 46, Op.RECV, 0, number)
    ranks[2].message(5, 5, 40, Op.RECV, 0, 1)  # the sender's record does not contain it
    for rank in ranks:
        rank.step(1, 101)
    report = report_of(ranks)
    waits = {(w.rank, w.collective): w.share for w in report.losses if w.kind == "wait"}
    assert waits[0, "recv"] == pytest.approx(10 / 300)
    assert waits[1, "send"] == pytest.approx(10 / 300)
    assert report.unmatched == 1
    assert report.confidence < 1
    assert "lacks a member's record" in report.doubts[0]


def test_gap_between_steps_is_input_unless_samples_differ(tmp_path):
    def share(samples):
        rank = Rank(tmp_path, 0, 1)
        rank.step(0, 10)
        for step in range(10):
            begin = 10 + 20 * step
            rank.was(State.GAP, begin, begin + 10)
            rank.was(State.FORWARD, begin + 10, begin + 20)
            for iterates in samples:
                rank.was(State.SAMPLE, begin + 5, begin + 5, amount=1, peer=int(iterates))
            rank.step(begin, begin + 20, number=step + 1)
        return report_of([rank]).states[0]

    assert share([])["input"] == pytest.approx(0.5)
    assert share([True, True, False])["input"] == pytest.approx(0.5)
    assert share([False])["other"] == pytest.approx(0.5)
    assert share([False])["input"] == 0


def test_other_time_is_reported_by_script_line(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.step(0, 10)
    rank.was(State.FORWARD, 10, 60)
    for at in (20, 70, 80, 90):
        rank.was(State.SAMPLE, at, at, amount=1 if at < 80 else 2)
    rank.step(10, 110, number=1)
    record = rank.record()
    record.lines.update(
        {n: {"file": "a.py", "line": 10 * n, "function": "f", "code": f"g{n}()"} for n in (1, 2)}
    )
    from paceline.analyze.figures.report import analyse
    from paceline.analyze.records.load_run import Run

    (other,) = [x for x in analyse(Run("test", [record], [])).losses if x.kind == "other"]
    assert [(line["line"], line["share"]) for line in other.lines] == [
        (20, pytest.approx(2 / 3)),
        (10, pytest.approx(1 / 3)),
    ]


def test_overwritten_events_before_window_raise_no_doubt(tmp_path):
    """Rank 1's ring begins some steps later; what only rank 0 has lies before the window."""
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for step in range(20):
        begin = 10 + 30 * step
        for i, rank in enumerate(ranks):
            if i and step < 5:
                rank.seq["0"] += 1
                continue
            rank.was(State.FORWARD, begin, begin + 20)
            rank.collective(begin + 20, begin + 20, begin + 25)
            rank.step(begin, begin + 30, number=step)
    report = report_of(ranks)
    assert (report.unmatched, report.confidence, report.doubts) == (0, 1.0, [])
