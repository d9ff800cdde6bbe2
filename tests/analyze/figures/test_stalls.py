"""Standstills of ranks and stalled exchanges, from hand-made records."""

import json

import pytest
from records import Rank, report_of

from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.records.load_run import Run
from paceline.record.ring.states import State
from paceline.report.losses import largest_losses
from paceline.report.sentences import cause, outliers, sentence, troubles
from paceline.report.terminal.run_report import render
from paceline.report.trace import timeline

HOSTS = ("host0", "host0", "host1", "host1")


def job(folder, still=(), stalled=None, steps=30, ranks=4, hosts=HOSTS):
    """Return ranks with steps of 20 ms, each with an all-reduce of 2 ms.

    still: step -> (duration in ms, ranks that stand still); stalled: step -> extra ms of its
    exchange.
    """
    still, stalled = dict(still), stalled or {}
    made = []
    for i in range(ranks):
        rank = Rank(folder, i, ranks, host=hosts[i], clock="one")
        rank.step(0, 10)
        begin = 10
        for step in range(1, steps + 1):
            stop, who = still.get(step, (0, ()))
            mine, slow = stop if i in who else 0, stalled.get(step, 0)
            if mine:
                rank.was(State.STILL, begin + 5, begin + 5 + mine, step=step)
            rank.was(State.FORWARD, begin, begin + 18 + mine)
            end = begin + 20 + stop + slow
            rank.collective(begin + 18 + mine, begin + 18 + mine, end, amount=1 << 20)
            rank.step(begin, end, samples=1, number=step)
            begin = end
        made.append(rank)
    return made


def said(ranks):
    report = report_of(ranks)
    return report, troubles(report)


def test_run_without_stalls_reports_none(tmp_path):
    report, lines = said(job(tmp_path))
    assert (report.stood_still, report.stalled, lines) == ([], [], [])


def test_standstill_is_reported_with_rank_step_and_waiting_ranks(tmp_path):
    report, (line,) = said(job(tmp_path, {7: (5000, [2])}))
    (one,) = report.stood_still
    assert (one.ranks, one.host, one.whole, one.step) == ([2], "host1", False, 7)
    assert one.seconds == pytest.approx(5)
    assert one.at_s == pytest.approx(0.01 + 6 * 0.02 + 0.005)
    assert one.waited_s == pytest.approx(4.987)  # without the 13 ms in which the others computed
    assert line == (
        "Rank 2 (host1) stood still for 5 s in step 7: none of its threads ran, as when a process "
        "is stopped or swapped out; others waited 4.99 s for it"
    )
    (outlier,) = report.step_times.outliers
    assert (outlier.step, outlier.state, outlier.rank) == (7, "still", 2)
    assert outlier.longer_s == pytest.approx(5)
    assert cause(outlier, report) == "rank 2 stood still"
    assert outliers(report) == []  # not reported a second time
    assert report.stalled == []
    assert sentence(report.losses[0], report) == (
        "waiting for rank 2 (host1), which had stood still; mostly in all-reduce, in step 7."
    )
    assert "signals that stopped the rank" in largest_losses(report)[0].look


def test_standstill_of_all_ranks_of_a_host_is_attributed_to_host(tmp_path):
    report, lines = said(job(tmp_path, {7: (3000, [2, 3]), 20: (2000, [0, 2])}))
    assert [(one.ranks, one.whole) for one in report.stood_still] == [
        ([2, 3], True),
        ([0], False),  # ranks of two hosts, and not all ranks of either host
        ([2], False),
    ]
    assert lines[0] == (
        "host1 stood still for 3 s in step 7: no thread of its ranks ran (ranks 2-3), as when a "
        "node or a whole job is paused; others waited 2.99 s for it"
    )
    assert [one.state for one in report.step_times.outliers] == ["still", "still"]


def test_stalled_exchange_is_reported_with_usual_duration(tmp_path):
    report, (line,) = said(job(tmp_path, stalled={9: 5000}))
    (one,) = report.stalled
    assert (one.collective, one.number, one.step, one.hosts) == ("all-reduce", 9, 9, 2)
    assert (one.seconds, one.usual_s) == (pytest.approx(5.002), pytest.approx(0.002))
    assert line == (
        "All-reduce 9 took 5 s in step 9 although all its ranks had arrived (usual: 2 ms): the "
        "network stalled"
    )
    (outlier,) = report.step_times.outliers
    assert (outlier.state, outlier.rank) == ("stalled", None)
    assert cause(outlier, report) == "a collective stalled"
    assert outliers(report) == []


def test_stalled_exchange_on_one_host_is_not_the_network(tmp_path):
    _, (line,) = said(job(tmp_path, stalled={9: 2000}, ranks=2))
    assert line.endswith("(usual: 2 ms): the collective itself stalled")


def test_standstill_during_exchange_is_not_a_stalled_exchange(tmp_path):
    ranks = job(tmp_path, stalled={9: 5000})
    at = 10 + 8 * 20 + 19
    ranks[1].was(State.STILL, at, at + 4900, step=9)
    report, (line,) = said(ranks)
    assert report.stalled == []
    assert "Rank 1 (host0) stood still for 4.9 s in step 9" in line
    assert "waited" not in line  # all ranks had arrived


@pytest.mark.parametrize("slow", [dict.fromkeys(range(1, 31), 2000), {9: 900}])
def test_constantly_slow_or_short_exchange_is_not_a_stall(tmp_path, slow):
    report, lines = said(job(tmp_path, stalled=slow))
    assert (report.stalled, lines) == ([], [])


def test_outlier_step_with_another_cause_is_still_reported(tmp_path):
    ranks = job(tmp_path, {7: (600, [1])}, stalled={20: 800})
    report, (line,) = said(ranks)
    assert "Rank 1 (host0) stood still for 600 ms in step 7" in line
    (other,) = outliers(report)
    assert other.startswith("Step 20: the ranks exchanged data")
    shown = " ".join(render(report).replace("│", " ").split())
    assert "Rank 1 (host0) stood still for 600 ms in step 7: none of its threads ran" in shown


def test_three_largest_stalls_are_reported_and_the_rest_counted(tmp_path):
    times = {step: (600 + 10 * step, [1]) for step in range(3, 9)}
    report, lines = said(job(tmp_path, times, stalled={20: 5000, 25: 1200}))
    assert len(report.stood_still) == 6
    assert [line.split(" in step ")[1].split()[0].rstrip(":") for line in lines[:3]] == [
        "20",
        "25",
        "8",
    ]
    assert lines[3] == "And 5 more standstills, the longest of 670 ms (--json)"


def test_timeline_shows_standstill_of_rank(tmp_path):
    records = [rank.record() for rank in job(tmp_path, {7: (5000, [2])})]
    timeline.write(analyse_with_window(Run("test", records, missing=[])), tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    (one,) = [event for event in events if event["name"] == "stood still"]
    assert (one["pid"], one["dur"]) == (2, 5_000_000)


def test_standstill_event_is_not_progress(tmp_path):
    from paceline.record.ring.tail import read_progress

    rank = Rank(tmp_path, 0, 1)
    rank.was(State.FORWARD, 1, 2)
    before = read_progress(rank.path)
    rank.was(State.STILL, 3, 5000)
    assert read_progress(rank.path) == before
