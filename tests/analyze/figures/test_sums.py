"""Sums of a report: losses, groups and waits add up to the states, on a CPU and on a GPU."""

import io
import random

import pytest
from records import Rank, report_of

from paceline.analyze.figures.measured_window import wait_matrix
from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.records.load_run import Run
from paceline.record.ring.states import Op, State
from paceline.report.console import PlainConsole
from paceline.report.terminal.run_report import panel


def mean(report, state):
    return sum(rank[state] for rank in report.states) / len(report.states)


def report_text(report):
    """Return the whole report as ``paceline report`` prints it."""
    console = PlainConsole(file=io.StringIO(), width=200)
    console.print(panel(report, 200, full=True))
    return console.file.getvalue()


def check_sums(report):
    """Assert that every table of the report adds up to the states of its ranks."""
    lost = {}
    for loss in report.losses:
        assert loss.share > 0
        lost[loss.kind] = lost.get(loss.kind, 0.0) + loss.share
    for kind in ("wait", "transfer", "checkpoint", "validation", "input", "starved", "other"):
        assert lost.get(kind, 0.0) == pytest.approx(mean(report, kind), abs=1e-9), kind
    assert sum(lost.values()) == pytest.approx(1 - report.efficiencies.useful, abs=1e-9)
    for kind in ("wait", "transfer"):
        groups = sum(getattr(group, kind) * len(group.ranks) for group in report.groups)
        assert groups / len(report.ranks) == pytest.approx(mean(report, kind), abs=1e-9)
        for group in report.groups:
            parts = sum(getattr(one, kind) for one in group.collectives)
            assert parts == pytest.approx(getattr(group, kind), abs=1e-9)
    waits = dict.fromkeys(report.ranks, 0.0)
    for pair in report.waited_for:
        waits[pair.rank] += pair.share
    for rank, states in zip(report.ranks, report.states, strict=True):
        assert waits[rank] <= states["wait"] + 1e-9


def gpu_job(folder, late=0, covered=60):
    """Return two GPU ranks that compute 60 of every 100 ms.

    The communication kernel begins 10 ms (rank 1: ``late`` ms more) after the step's start;
    ``covered``: until when the kernels of other work run beside it.
    """
    made = [Rank(folder, i, 2) for i in range(2)]
    for i, rank in enumerate(made):
        for step in range(10):
            begin = 100 * step
            rank.was(State.KERNEL, begin, begin + covered)
            fields = {"seq": step + 1, "group": 1, "op": Op.ALL_REDUCE, "amount": 1 << 20}
            start = begin + 10 + late * i
            rank.was(State.COMMUNICATION_KERNEL, start, begin + 90, **fields)
            rank.was(State.KERNEL, begin + 90, begin + 100)
            rank.step(begin, begin + 100, number=step, samples=4)
    return made


def test_communication_under_computing_on_gpu_is_no_loss(tmp_path):
    report = report_of(gpu_job(tmp_path, covered=90))
    assert report.efficiencies.useful == pytest.approx(1)
    assert report.losses == []
    (group,) = report.groups
    assert (group.wait, group.transfer) == (0, 0)
    assert group.hidden == pytest.approx(0.8)
    assert report.waited_for == []
    check_sums(report)


def test_partly_covered_communication_on_gpu_costs_what_is_exposed(tmp_path):
    """The last kernel starts after 70 ms: of the wait 10 ms are exposed, then 20 ms of transfer."""
    report = report_of(gpu_job(tmp_path, late=60))
    first, second = report.states
    assert (first["wait"], first["transfer"]) == (pytest.approx(0.1), pytest.approx(0.2))
    assert (second["wait"], second["transfer"]) == (0, pytest.approx(0.2))
    (group,) = report.groups
    assert group.wait == pytest.approx(0.05)
    assert group.transfer == pytest.approx(0.2)
    (pair,) = report.waited_for
    assert (pair.rank, pair.waited_for, pair.share) == (0, 1, pytest.approx(0.1))
    check_sums(report)


def test_communication_kernels_at_the_same_time_are_counted_once(tmp_path):
    """Kernels of two groups on two streams, side by side: the exposed time is attributed to one."""
    made = [Rank(tmp_path, i, 2, groups={"a": (2, i), "b": (2, i)}) for i in range(2)]
    for rank in made:
        for step in range(5):
            begin = 100 * step
            rank.was(State.KERNEL, begin, begin + 50)
            fields = {"seq": step + 1, "op": Op.ALL_GATHER, "amount": 1 << 20}
            rank.was(State.COMMUNICATION_KERNEL, begin + 50, begin + 80, group=1, **fields)
            rank.was(State.COMMUNICATION_KERNEL, begin + 60, begin + 90, group=2, **fields)
            rank.was(State.KERNEL, begin + 90, begin + 100)
            rank.step(begin, begin + 100, number=step)
    report = report_of(made)
    assert mean(report, "transfer") == pytest.approx(0.4)
    assert {group.name: pytest.approx(group.transfer) for group in report.groups} == {
        "a": 0.3,
        "b": 0.1,
    }
    check_sums(report)


def test_kernels_of_unknown_collectives_have_a_row(tmp_path):
    made = [Rank(tmp_path, i, 2) for i in range(2)]
    for rank in made:
        for step in range(10):
            begin = 100 * step
            rank.was(State.KERNEL, begin, begin + 60)
            known = {"seq": step + 1, "group": 1, "amount": 1 << 20}
            rank.was(State.COMMUNICATION_KERNEL, begin + 60, begin + 80, op=Op.ALL_REDUCE, **known)
            rank.was(State.COMMUNICATION_KERNEL, begin + 80, begin + 90, op=Op.ALL_TO_ALL)
            rank.was(State.KERNEL, begin + 90, begin + 100)
            rank.step(begin, begin + 100, number=step)
    report = report_of(made)
    found = {group.name: (group.ranks, pytest.approx(group.transfer)) for group in report.groups}
    assert found == {"0": ([0, 1], 0.2), "unknown": ([0, 1], 0.1)}
    assert "all-to-all" in report_text(report)
    check_sums(report)


def test_groups_of_one_rank_and_rooted_operations_have_a_row(tmp_path):
    made = []
    for i in range(3):
        rank = Rank(tmp_path, i, 3, groups={"0": (3, i), f"alone{i}": (1, 0)})
        rank.step(0, 10)
        for step in range(10):
            begin = 10 + 100 * step
            rank.was(State.FORWARD, begin, begin + 40)
            rank.collective(begin + 40, begin + 40, begin + 50, group=f"alone{i}")
            # the root goes on when it has sent; the others wait for it
            rank.collective(begin + 50, begin + 50, begin + 60 + 5 * i, op=Op.BROADCAST, peer=0)
            rank.collective(begin + 75, begin + 75, begin + 80 + i, op=Op.GATHER, peer=1)
            rank.step(begin, begin + 100, number=step + 1)
        made.append(rank)
    report = report_of(made)
    names = {group.name for group in report.groups}
    assert names == {"0", "alone0", "alone1", "alone2"}
    whole = next(group for group in report.groups if group.name == "0")
    assert {one.name for one in whole.collectives} == {"broadcast", "gather"}
    text = report_text(report)
    for name in (*names, "broadcast", "gather"):
        assert name in text
    check_sums(report)


def test_collective_across_the_edge_of_the_window_has_a_row(tmp_path):
    """A broadcast that began before the window is cut at its start, and has a row of its own."""
    made = [Rank(tmp_path, i, 2) for i in range(2)]
    for i, rank in enumerate(made):
        rank.collective(5, 5, 30, op=Op.BROADCAST, peer=0)
        rank.step(0, 10 + i)
        for step in range(10):
            begin = 30 + 20 * step
            rank.was(State.FORWARD, begin, begin + 10)
            rank.collective(begin + 10, begin + 10, begin + 15)
            rank.step(begin, begin + 20, number=step + 1)
    report = report_of(made)
    (group,) = report.groups
    assert {one.name: one.count for one in group.collectives} == {"all-reduce": 10, "broadcast": 0}
    check_sums(report)


def test_unaligned_clocks_still_add_up(tmp_path):
    """Hosts that never communicate: wait and transfer are one figure, and everything adds up."""
    made = []
    for i in range(4):
        group = f"data{i // 2}"
        rank = Rank(tmp_path, i, 4, host=f"host{i // 2}", groups={group: (2, i % 2)})
        rank.step(0, 10)
        for step in range(10):
            begin = 10 + 60 * step
            arrived = begin + 20 + 10 * (i % 2)
            rank.was(State.FORWARD, begin, arrived)
            rank.collective(arrived, arrived, begin + 50, group=group)
            rank.step(begin, begin + 60, number=step + 1)
        made.append(rank)
    report = report_of(made)
    assert not report.clocks_aligned
    assert mean(report, "wait") == 0
    check_sums(report)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(25))
def test_random_records_add_up(tmp_path, seed, on_gpu):
    draw = random.Random(seed)
    groups = [{"0": (3, i), "pair": (2, i % 2), f"alone{i}": (1, 0)} for i in range(3)]
    del groups[2]["pair"]
    made = [Rank(tmp_path, i, 3, groups=groups[i]) for i in range(3)]
    for rank in made:
        rank.step(0, 10)
        for _ in range(draw.randint(20, 120)):  # events overlap in every way
            start = draw.uniform(-20, 1000)
            kinds = (State.FORWARD, State.INPUT, State.VALIDATION, State.CHECKPOINT, State.KERNEL)
            rank.was(draw.choice(kinds[: 4 + on_gpu]), max(start, 0), start + 20 + draw.random())
        for _ in range(draw.randint(20, 80)):
            group, op = draw.choice(list(rank.number)), draw.choice(list(Op))
            times = sorted(draw.uniform(0, 1000) for _ in range(2))
            end = min(times[1], times[0] + draw.uniform(0, 80))
            rank.seq[group] += 1
            fields = {"seq": rank.seq[group], "op": op, "peer": draw.randint(0, 1)}
            fields |= {"group": rank.number[group], "amount": 1 << draw.randint(0, 24)}
            if on_gpu:
                rank.was(State.COMMUNICATION_KERNEL, times[0], end, **fields)
                continue
            rank.was(State.BLOCKED, (times[0] + end) / 2, end, **fields)
            if draw.random() < 0.9:  # the ring may have overwritten it
                rank.was(State.COLLECTIVE, times[0], end, **fields)
            if draw.random() < 0.2:
                rank.was(State.CALL, times[0], (times[0] + end) / 2, **fields)
        for step in range(1, 11):
            rank.step(100 * (step - 1), 100 * step, number=step)
        if on_gpu:
            rank.was(State.KERNEL, 0, 1)
            rank.was(State.KERNEL, 999, 1000)
    report = report_of(made)
    check_sums(report)


def test_matrix_of_waits_is_part_of_the_states(tmp_path):
    records = [rank.record() for rank in gpu_job(tmp_path, late=60)]
    m = analyse_with_window(Run("test", records, missing=[])).measured
    shares = wait_matrix(m)
    assert shares.sum(axis=1) == pytest.approx([0.1, 0.0])


@pytest.mark.parametrize("table", ["groups", "losses"])
def test_tables_that_do_not_add_up_are_a_doubt(tmp_path, monkeypatch, table):
    """A record that contradicts itself still gives a report, of lower confidence."""
    from paceline.analyze.figures import losses
    from paceline.analyze.figures import report as figures

    monkeypatch.undo()  # reports whose tables differ fail a test
    ranks = gpu_job(tmp_path, late=60)
    whole = report_of(ranks)
    if table == "groups":
        made = figures.group_figures
        monkeypatch.setattr(figures, "group_figures", lambda m: made(m)[1:])
    else:
        monkeypatch.setattr(losses, "wait_losses", lambda *_: [])
    report = report_of(ranks)
    assert (whole.confidence, report.confidence) == (1.0, 0.5)
    assert "the record contradicts itself" in " ".join(report.doubts)
    assert "the record contradicts itself" in report_text(report)
