"""Equal runs differ, and comparisons say so in the stated share of cases."""

from dataclasses import replace

import numpy as np
import pytest
from records import Rank, report_of

from paceline.analyze.figures.compare_runs import (
    BETWEEN_RUNS,
    chance_limit,
    check_gate,
    compare,
    compare_states,
)
from paceline.record.ring.states import State


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the report of one rank that computes for 80 ms of each step of 100 ms, and loads."""
    rank = Rank(tmp_path_factory.mktemp("run"), 0, 1)
    rank.step(0, 1)
    for number in range(40):
        start = 1 + 100 * number
        rank.was(State.INPUT, start, start + 20)
        rank.was(State.FORWARD, start + 20, start + 100)
        rank.step(start, start + 100, samples=8, number=number + 1)
    return report_of([rank])


class Runs:
    """Equal runs: they differ by ``between``, and their steps by drift and heavy tails."""

    def __init__(self, base, seed, between=BETWEEN_RUNS):
        self.base, self.between = base, between
        self.rng = np.random.default_rng(seed)

    def run(self, longer=1.0):
        rng, base = self.rng, self.base
        level = longer * (1 + rng.normal(0, self.between))
        drift = np.cumsum(rng.normal(0, 0.003, len(base.ranges)))
        factors = level * (1 + drift + 0.01 * rng.standard_t(3, len(drift)))
        ranges = [
            replace(r, seconds=r.seconds * f) for r, f in zip(base.ranges, factors, strict=True)
        ]
        window = sum(one.seconds for one in ranges)
        rate = base.samples / window
        return replace(base, ranges=ranges, window_s=window, samples_per_s=rate)

    def share(self, sizes, cases, of, longer=1.0):
        """Return the share of comparisons of groups of these sizes for which ``of`` is true."""
        groups = (
            ([self.run() for _ in range(sizes[0])], [self.run(longer) for _ in range(sizes[1])])
            for _ in range(cases)
        )
        return np.mean([bool(of(before, after)) for before, after in groups])


def step_is_real(before, after):
    return next(one for one in compare(before, after) if one.figure == "step_ms").real


def states_are_explained(before, after):
    return compare_states(before, after).explained_by


def fails_gate(before, after):
    return check_gate(before, after, 0.05).verdict == "slower"


SLOW = [pytest.param(one, marks=pytest.mark.long) for one in ((1, 1), (3, 1), (5, 5))]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), *SLOW])
def test_equal_runs_rarely_differ(base, sizes):
    runs, cases = Runs(base, 1), 400
    most = 0.05 + 2 * (0.05 * 0.95 / cases) ** 0.5
    assert runs.share(sizes, cases, step_is_real) <= most
    assert runs.share(sizes, cases, states_are_explained) <= most
    assert runs.share(sizes, cases, fails_gate) <= 0.01


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (5, 5)])
def test_noise_between_runs_is_measured_where_it_is_larger_than_assumed(base, sizes):
    runs = Runs(base, 2, between=0.1)
    assert runs.share(sizes, 400, step_is_real) <= 0.075


def test_runs_that_are_slower_by_the_tolerance_rarely_fail(base):
    for sizes in ((1, 1), (3, 3)):
        assert Runs(base, 3).share(sizes, 400, fails_gate, longer=1.05) <= 0.075


@pytest.mark.parametrize(
    ("sizes", "between", "longer"),
    [((1, 1), BETWEEN_RUNS, 1.2), ((3, 3), BETWEEN_RUNS, 1.14), ((5, 2), 0.005, 1.075)],
)
def test_slower_runs_are_found(base, sizes, between, longer):
    runs = Runs(base, 4, between)
    assert runs.share(sizes, 200, step_is_real, longer) > 0.9
    assert runs.share(sizes, 200, fails_gate, longer) > 0.8


def test_more_runs_lower_the_limit_of_chance(base):
    runs = Runs(base, 5, between=0.005)
    limits = [
        np.median(
            [
                chance_limit(
                    compare([runs.run() for _ in range(n)], [runs.run() for _ in range(n)])
                )
                for _ in range(50)
            ]
        )
        for n in (1, 3, 5)
    ]
    assert limits[0] == pytest.approx(1.96 * 2**0.5 * BETWEEN_RUNS, rel=0.1)
    assert limits[0] > 3 * limits[1] > 3 * limits[2]


def test_small_part_of_a_step_may_change_by_less(base):
    """Equal runs differ less in 20 ms than in the whole step, so that 8 ms more are seen."""
    slower = replace(
        base,
        states=[base.states[0] | {"input": 0.28, "useful": 0.72}],
        ranges=[replace(r, states=r.states | {"input": 0.28, "useful": 0.72}) for r in base.ranges],
    )
    rows = {row.state: row for row in compare_states([base], [slower]).rows}
    assert rows["input"].real
    assert rows["input"].limit_s == pytest.approx(0.0034, abs=0.0003)
