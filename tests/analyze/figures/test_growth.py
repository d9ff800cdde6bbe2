"""Memory that grows is found; memory that moves and settles is not."""

import math
import random
import re

import pytest
from records import Rank, report_of

from paceline.analyze.figures.memory import find_growth
from paceline.record.ring.states import Memory, State
from paceline.report.run_verdict import verdict_of_run
from paceline.report.sentences import memory_warnings
from paceline.report.terminal.run_report import render

MIB = 1 << 20
NOISE = random.Random(3)
SERIES = {  # MiB after t seconds
    "flat": lambda t: 500 + NOISE.gauss(0, 2),
    "cache that fills up": lambda t: 500 + 400 * (1 - math.exp(-t / 15)),
    "cache with a bound": lambda t: 500 + min(10 * t, 300),
    "first steps of an allocator": lambda t: 200 + (300 if t > 20 else 15 * t),
    "epochs": lambda t: 500 + 20 * (t % 15),
    "two long epochs": lambda t: 500 + 5 * (t % 40),
    "one rise late": lambda t: 500 + 100 * (t > 60),
    "random walk": None,
}


def walk():
    level = [500.0]
    for _ in range(100):
        level.append(level[-1] + NOISE.gauss(0, 5))
    return lambda t: level[int(t)]


def rank_with(folder, mib, number=0, size=1, seconds=80, available=8192, kind=Memory.HOST):
    """Return a rank with a step of 100 ms, and one memory sample a second."""
    rank = Rank(folder, number, size)
    rank.step(0, 10)
    for step in range(1, 10 * seconds + 1):
        begin = 10 + 100 * (step - 1)
        rank.was(State.FORWARD, begin, begin + 100)
        rank.step(begin, begin + 100, samples=8, number=step)
        if step % 10 == 1:
            at = begin / 1000
            for peer, amount in ((kind, mib(at)), (kind + 1, available)):
                rank.was(State.MEMORY, begin, begin, amount=int(amount * MIB), peer=peer, step=step)
    return rank


@pytest.mark.parametrize("name", SERIES)
def test_healthy_memory_is_no_growth(tmp_path, name):
    rank = rank_with(tmp_path, SERIES[name] or walk())
    assert find_growth([rank.record()]) == []


def test_imports_before_the_first_step_are_no_growth(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    for second in range(17):
        at, mib = 1000 * second, 240 + 16 * second
        rank.was(State.MEMORY, at, at, amount=mib * MIB, peer=Memory.HOST, step=max(second - 13, 0))
    assert find_growth([rank.record()]) == []


@pytest.mark.parametrize(
    "series",
    [
        lambda t: 500 + 2 * t,
        lambda t: 500 + 2 * t + NOISE.gauss(0, 1.5),
        lambda t: 500 + 2 * t + 20 * (t % 5),  # epochs on top of it
    ],
    ids=["steady", "noisy", "in epochs"],
)
def test_growth_has_a_rate_with_an_interval_and_an_end(tmp_path, series):
    (found,) = find_growth([rank_with(tmp_path, series).record()])
    assert (found.rank, found.kind) == (0, "host")
    assert found.rate == pytest.approx(2 * MIB, rel=0.1)
    assert found.low <= found.rate <= found.high
    assert found.low > 0
    assert found.per_step == pytest.approx(0.2 * MIB, rel=0.1)
    assert found.hours_left == pytest.approx(8192 / 2 / 3600, rel=0.1)


def test_ranks_of_a_node_share_its_memory_but_not_their_devices(tmp_path):
    grows = lambda t: 500 + 2 * t  # noqa: E731
    for kind, share in ((Memory.HOST, 2), (Memory.DEVICE, 1)):
        both = [rank_with(tmp_path, grows, i, 2, kind=kind).record() for i in range(2)]
        found = find_growth(both)
        assert [one.rank for one in found] == [0, 1]
        assert found[0].hours_left == pytest.approx(8192 / 2 / share / 3600, rel=0.01)
        assert found[0].kind == ("host" if kind == Memory.HOST else "device")


def test_growth_that_ends_the_job_is_the_verdict_and_a_warning(tmp_path):
    report = report_of([rank_with(tmp_path, lambda t: 500 + 2 * t)])
    verdict = verdict_of_run(report)
    assert verdict.verdict == "The host memory grows, and ends the job in about 68 min."
    assert "append loss.item()" in verdict.next
    (warning,) = memory_warnings(report)
    assert warning.startswith("The host memory of rank 0 (host) grows by 7.03 GiB per hour")
    assert "the node has none left in 68 min if this continues" in warning
    text = re.sub(r"[│\s]+", " ", render(report))
    assert "The host memory of rank 0 (host) grows by 7.03 GiB per hour" in text


def test_slow_growth_is_reported_but_not_warned_about(tmp_path):
    slow = lambda t: 60_000 + 0.16 * t  # noqa: E731
    report = report_of([rank_with(tmp_path, slow, available=1 << 20)])
    assert report.memory == []  # 12 MiB are less than 1 % of 60 GB: not sure in this time
    assert memory_warnings(report) == []
