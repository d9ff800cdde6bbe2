"""Unmodified scripts with unusual training loops are recorded and reported correctly."""

import functools
import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ranks

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run

ZOO = Path(__file__).parent / "zoo"


@dataclass(frozen=True)
class Told:
    """What a script's report must contain.

    present: states that take more than 0.1 % of the time of some rank; absent: states that no rank
    may spend that much time in.
    """

    collectives: set[str] = field(default_factory=lambda: {"all-reduce"})
    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ("validation", "checkpoint")
    samples: int | None = None  # in each step, each counted once
    steps: int = 30
    args: tuple[object, ...] = ()
    ranks: int = 2
    needs: str | None = None
    other: float = 0.35  # maximum share of unexplained time


STATES = ("validation", "checkpoint")
P2P = {"send", "recv"}
CASES = {
    "ddp": Told(present=STATES, absent=(), collectives={"all-reduce", "barrier"}, samples=256),
    "by_hand": Told(samples=256),
    "accumulate": Told(samples=512),
    "accumulate --how flag": Told(samples=512, args=("--how", "flag")),
    "accumulate --how two": Told(samples=256, args=("--how", "two")),
    "a_list": Told(samples=256),
    "alone": Told(collectives=set(), samples=128, ranks=1),
    "by_count": Told(
        collectives=set(), present=("validation",), absent=("checkpoint",), samples=128, ranks=1
    ),
    "closures": Told(),
    "gan": Told(samples=256),
    "transforms": Told(present=("input",), samples=128),
    "methods": Told(),
    "engine": Told(),
    "scaler": Told(steps=26),
    "profiled": Told(),
    "compiled": Told(),
    "groups": Told(collectives={"all-reduce", "barrier"}, other=0.5),
    "p2p": Told(collectives={"all-reduce", *P2P}),
    "workers": Told(present=("input",), samples=128),
    "pipeline": Told(collectives=P2P, samples=256),
    "tensor_parallel": Told(samples=128),
    "fsdp2": Told(
        collectives={"all-gather", "reduce-scatter"},
        present=("checkpoint",),
        absent=("validation",),
    ),
    "spawn": Told(ranks=1),
    "spawn --how process": Told(ranks=1, args=("--how", "process")),
    "lightning_script": Told(present=STATES, absent=(), samples=256, needs="lightning"),
    "accelerate_script": Told(
        collectives={"all-reduce", "all-gather"},
        present=("validation",),
        absent=("checkpoint",),
        samples=256,
        needs="accelerate",
    ),
    "trainer_script": Told(
        collectives={"all-reduce", "all-gather"}, present=STATES, absent=(), needs="transformers"
    ),
}


def path_of(script: str) -> Path:
    """Return the zoo script with this name from any of the zoo's folders."""
    (path,) = ZOO.rglob(f"{script}.py")
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Run a zoo script once under ``paceline run --record``; return its output and report."""

    @functools.cache
    def run(script, *args, started=2):
        folder = tmp_path_factory.mktemp(script) / "record"
        launcher = f"paceline --record {folder}"
        result = ranks.run(path_of(script), *args, ranks=started, launcher=launcher)
        return result, analyse(load_run(folder))

    return run


# Compiling takes 15 s; the others are variants of cases that are not slow.
SLOW = {"compiled", "accumulate --how flag", "a_list", "closures", "methods", "profiled", "scaler"}
SLOW |= {
    "spawn",
    "spawn --how process",
    "accumulate --how two",
    "alone",
    "gan",
    "transforms",
    "trainer_script",
}
CHOSEN = [pytest.param(n, marks=pytest.mark.long) if n in SLOW else n for n in CASES]


@pytest.mark.parametrize("name", CHOSEN)
def test_unchanged_script_is_recorded_correctly(recorded, name):
    told = CASES[name]
    if told.needs and importlib.util.find_spec(told.needs) is None:
        pytest.skip(f"{told.needs} is not installed (pip install paceline[frameworks])")
    result, report = recorded(name.split()[0], *told.args, started=told.ranks)
    assert re.search(r"final loss", result.stdout), result.stdout
    size = told.ranks if name.split()[0] != "spawn" else 2
    assert (report.ranks, report.size, report.missing_ranks) == (list(range(size)), size, [])
    assert report.steps == told.steps
    assert (report.confidence, report.doubts, report.unmatched) == (1.0, [], 0)
    if told.samples is not None:
        steps = report.ranges[-1].last - report.ranges[0].first + 1
        assert report.samples / steps == pytest.approx(told.samples, rel=0.15)
    found = {c.name for group in report.groups for c in group.collectives}
    assert told.collectives <= found
    for state in told.present:
        assert max(rank[state] for rank in report.states) > 0.001, state
    for state in told.absent:
        assert max(rank[state] for rank in report.states) < 0.001, state
    for rank in report.states:
        assert sum(rank.values()) == pytest.approx(1)
        assert rank["useful"] + rank["starved"] > 0.1  # on a busy machine, ranks wait for a core
        assert rank["other"] < told.other
    if size == 2:
        e = report.efficiencies
        assert e.serialisation * e.transfer == pytest.approx(e.communication)
        assert e.load_balance * e.communication == pytest.approx(e.parallel)
    assert json.loads(report.to_json())["format"] == "paceline-report"


@pytest.mark.parametrize("name", ["ddp", "pipeline"])
def test_recording_does_not_change_the_result(recorded, name):
    plain = ranks.run(path_of(name)).stdout
    result, _ = recorded(name, started=2)
    loss = re.compile(r"final loss ([\d.]+)")
    assert loss.search(result.stdout).group(1) == loss.search(plain).group(1)


def test_process_groups_are_named_and_add_up(recorded):
    """Groups of one rank have their rows, too: they may block a rank for a moment."""
    _, report = recorded("groups", started=2)
    assert sorted(group.size for group in report.groups) == [1, 1, 2, 2]
    assert len({group.name for group in report.groups}) == 4
    for kind in ("wait", "transfer"):
        groups = sum(getattr(group, kind) * len(group.ranks) for group in report.groups)
        assert groups == pytest.approx(sum(rank[kind] for rank in report.states), abs=1e-9)


@pytest.mark.long
def test_profiler_session_of_script_gets_all_events(recorded):
    plain = ranks.run(path_of("profiled")).stdout
    result, _ = recorded("profiled", started=2)
    counts = [int(re.search(r"(\d+) events", text).group(1)) for text in (plain, result.stdout)]
    assert counts[1] == pytest.approx(counts[0], rel=0.1)


def test_evaluation_loop_stopped_by_count_ends_with_last_batch(recorded):
    """A loop that stops by count leaves its iterator's address to another iterator or to none.

    The time between the two is not an evaluation.
    """
    _, report = recorded("by_count", started=1)
    assert report.states[0]["validation"] < 0.4
    assert report.states[0]["useful"] + report.states[0]["starved"] > 0.4


def test_input_wait_without_loader_is_gap_between_steps(recorded):
    _, report = recorded("a_list", started=2)
    assert all(rank["input"] < 0.1 for rank in report.states)
    _, report = recorded("a_list", "--generator", "0.02", started=2)
    for rank in report.states:
        slept = 0.02 * (report.ranges[-1].last - report.ranges[0].first + 1)
        # On a busy machine a sleep takes longer.
        assert -0.1 < rank["input"] - slept / report.window_s < 0.25
        assert rank["other"] < 0.1
