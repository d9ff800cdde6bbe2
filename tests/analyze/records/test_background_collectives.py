"""Collectives of another thread (an asynchronous checkpoint's) are beside a rank's states."""

import pytest
import ranks
from records import MS, Rank, report_of

from paceline.analyze.figures.report import analyse
from paceline.analyze.live.live_view import view
from paceline.analyze.records.load_run import load_run
from paceline.analyze.records.match_collectives import match_collectives
from paceline.analyze.records.read_record import parse_record
from paceline.record.ring.ring import VERSION
from paceline.record.ring.states import Op, State
from paceline.record.ring.tail import Tail
from paceline.report.terminal.run_report import render
from paceline.report.terminal.top import doing_in_words


def trained(folder, rank, size=2, steps=10):
    """Write a rank that computes all the time, and saves in a thread of group "save"."""
    made = Rank(folder, rank, size, groups={"0": (size, rank), "save": (size, rank)})
    made.step(0, 10)
    for step in range(steps):
        begin = 10 + 10 * step
        made.was(State.FORWARD, begin, begin + 9)
        made.was(State.BLOCKED, begin + 9, begin + 10, seq=step + 1, group=1, op=Op.ALL_REDUCE)
        made.was(State.COLLECTIVE, begin + 9, begin + 10, seq=step + 1, group=1, op=Op.ALL_REDUCE)
        made.step(begin, begin + 10, samples=8, number=step + 1)
    return made


def saves(rank, number, start, end, group=2):
    fields = {"seq": number, "group": group, "op": Op.GATHER, "peer": 0}
    rank.was(State.BACKGROUND_BLOCKED, start, end, **fields)
    rank.was(State.BACKGROUND_COLLECTIVE, start, end, **fields)


def test_background_collective_is_not_waiting_of_the_training(tmp_path):
    ranks_ = [trained(tmp_path, i) for i in range(2)]
    plain = report_of(ranks_)
    for i, rank in enumerate(ranks_):
        saves(rank, 1, 20 + 10 * i, 60)
        saves(rank, 2, 100, 300)  # goes on after the training
    report = report_of(ranks_)
    assert report.states == plain.states
    assert report.hidden == plain.hidden
    assert report.window_s == plain.window_s
    assert report.losses == plain.losses
    assert (report.confidence, report.unmatched) == (1.0, 0)
    assert report.background == pytest.approx([0.5, 0.4])
    assert plain.background == [0.0, 0.0]
    assert "background" in render(report)
    assert "background" not in render(plain)
    (group,) = [group for group in report.groups if group.name == "save"]
    assert [c.name for c in group.collectives] == ["gather"]
    assert group.wait == group.transfer == 0.0


def test_collective_matches_whichever_thread_of_a_rank_calls_it(tmp_path):
    first, second = (trained(tmp_path, i) for i in range(2))
    saves(first, 1, 20, 60)
    fields = {"seq": 1, "group": 2, "op": Op.GATHER, "peer": 0}
    second.was(State.BLOCKED, 50, 60, **fields)
    second.was(State.COLLECTIVE, 50, 60, **fields)
    matched = match_collectives([first.record(), second.record()])
    assert matched.count_unmatched() == 0
    assert matched.launches["background"].sum() == 1


def tail(rank, at):
    return Tail("r", round(at * MS), "R", rank.ring.snapshot())


def begin(rank, state, since, **fields):
    rank.ring.begin_writer(type("At", (), {"step": 10}))(
        state, round(since * MS), fields["seq"], fields["group"], fields["op"]
    )


def test_hang_in_a_background_collective_names_the_missing_rank(tmp_path):
    first, second = (trained(tmp_path, i) for i in range(2))
    fields = {"seq": 1, "group": 2, "op": Op.GATHER}
    begin(first, State.BACKGROUND_BLOCKED, 60, **fields)
    begin(first, State.BLOCKED, 109, seq=10, group=1, op=Op.ALL_REDUCE)  # has ended since
    working = view([tail(first, 112), tail(second, 112)], [])
    assert not working.now[0].in_background
    found = view([tail(first, 9000), tail(second, 9000)], [])
    assert found.now[0].in_background
    assert "in gather 1 of group save in another thread for" in doing_in_words(found.now[0])
    assert [(s.collective, s.inside, s.absent) for s in found.standing] == [("gather", [0], [1])]


def test_record_of_version_4_has_no_background_operation(tmp_path):
    rank = trained(tmp_path, 0)
    begin(rank, State.BACKGROUND_BLOCKED, 60, seq=1, group=2, op=Op.GATHER)
    data = bytearray(rank.ring.snapshot())
    assert parse_record(bytes(data)).begun_in_background.seq == 1
    assert data[8] == VERSION == 8
    data[8] = 4
    older = parse_record(bytes(data))
    assert older.begun_in_background is None
    assert len(older.events) == len(rank.record().events)


ASYNCHRONOUS_SAVE = """
    import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    savers = dist.new_group()
    model = DDP(nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = None
    for step in range(60):
        model(torch.randn(256, 512)).square().mean().backward()
        optimizer.step()
        if step % 10 == 5:
            if saved is not None:
                saved.result()
            saved = dcp.async_save(
                {"model": model.state_dict()},
                checkpoint_id=f"{sys.argv[1]}/{step}", process_group=savers,
            )
    saved.result()
    print("final loss")
"""


@pytest.mark.long
def test_asynchronous_checkpoint_is_a_row_of_its_own(tmp_path):
    folder = tmp_path / "record"
    script = ranks.write(tmp_path, ASYNCHRONOUS_SAVE)
    ranks.run(script, tmp_path / "saved", launcher=f"paceline --record {folder}")
    run = load_run(folder)
    report = analyse(run)
    assert min(report.background) > 0
    assert (report.confidence, report.unmatched) == (1.0, 0)
    for record in run.records:
        groups = {int(n): g["name"] for n, g in record.meta["groups"].items()}
        training = record.events_in(State.BLOCKED, State.COLLECTIVE)
        steps = record.events_in(State.STEP)
        during = training[training["start"] > steps["end"][0]]
        during = during[during["end"] < steps["end"][-1]]
        assert {groups[int(number)] for number in during["group"]} == {"0"}
