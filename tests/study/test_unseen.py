"""The scorecard of unseen scripts: injected faults are valid code, answers are judged rightly."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "scorecard"
sys.path.insert(0, str(FOLDER))

import draw  # noqa: E402
from build import SCRIPTS, build  # noqa: E402
from injectors import load_half  # noqa: E402
from judge import Case, figures, read_answer  # noqa: E402
from kinds import KINDS  # noqa: E402
from rates import interval  # noqa: E402

SOURCES = {name: path.read_text() for name, path in SCRIPTS.items()}


@pytest.mark.parametrize("half", ["open", "kept-out"])
def test_halves_are_as_drawn_and_every_kind_is_on_both_sides(half):
    kept = draw.kept_out()
    wanted = {
        f"{kind}/{way}"
        for kind, ways in draw.WAYS.items()
        for way in ways
        if (way in kept[kind]) == (half == "kept-out")
    }
    found = load_half(half)
    assert {one.name for one in found} == wanted
    assert {one.kind for one in found} == set(KINDS)


@pytest.mark.long
@pytest.mark.parametrize("half", ["open", "kept-out"])
def test_every_injector_gives_valid_scripts(half, tmp_path):
    for injector in load_half(half):
        fitting = [name for name in SCRIPTS if injector.fits(SOURCES[name])]
        assert len(fitting) >= 2, injector.name
        for name in fitting:
            built = build(tmp_path, name, injector, injector.start)
            for file, ranges in built.injected.items():
                lines = (tmp_path / file).read_text().splitlines()
                assert all(1 <= first <= last <= len(lines) for first, last in ranges)
            compile(built.script.read_text(), "train.py", "exec")


def test_script_without_fault_has_no_marks(tmp_path):
    built = build(tmp_path, "cnn_ddp", None, 0.0)
    assert "# <" not in built.script.read_text()
    assert built.injected == {}


def answer(*causes):
    return json.dumps({"causes": [{"id": i, "share": s, "evidence": e} for i, s, e in causes]})


def judged(case, *causes):
    read_answer(case, 0, answer(*causes), "")
    return case


LINES = {"train.py": [(20, 24)], "common.py": [(1, 9)]}


def test_cause_with_lines_is_right_only_at_the_injected_code():
    there = {"lines": [{"file": "/x/train.py", "line": 22, "code": "barrier()"}]}
    elsewhere = {
        "lines": [{"file": "/x/train.py", "line": 60}, {"file": "/x/train.py", "line": 22}]
    }
    case = Case("gnn", "python-loop/forward", share=0.2, lines=LINES)
    assert judged(case, ("script", 0.2, there)).first
    assert case.placed
    assert case.off == pytest.approx(0)
    assert not judged(case, ("script", 0.2, elsewhere)).first
    assert not judged(case, ("script", 0.2, {})).named
    judged(case, ("exchange-latency", 0.3, {}), ("line", 0.15, {"at": "common.py:4"}))
    assert (case.first, case.named, case.off) == (False, True, pytest.approx(-5))


def test_cause_of_the_kind_is_right_without_a_line():
    case = Case("gnn", "barriers/patched", share=0.2, lines=LINES)
    assert judged(case, ("synchronisation", 0.1, {})).first


def test_causes_of_other_programs_count_only_on_a_quiet_machine():
    noise, right = ("jitter", 0.3, {}), ("checkpoint", 0.2, {})
    case = judged(Case("gnn", "checkpoints/patched", share=0.2), noise, right)
    assert not case.first
    case.foreign = 0.5
    assert case.first
    healthy = judged(Case("gnn"), noise)
    assert healthy.false_alarm
    healthy.foreign = 0.5
    assert not healthy.false_alarm


def test_figures_count_what_was_measured_and_is_strong_enough():
    right, weak = (Case("gnn", "barriers/patched", share=share) for share in (0.2, 0.05))
    for case in (right, weak):
        judged(case, ("synchronisation", 0.18, {}))
    failed = Case("gnn", "lock/sample", error="exit code 1")
    ended = Case("gnn", "lock/sample", share=0.3)
    read_answer(ended, 1, "", "Traceback")
    found = figures([right, weak, failed, ended, judged(Case("gan"))])
    assert (found["first"]["hits"], found["first"]["of"]) == (1, 2)
    assert (found["ended"]["hits"], found["ended"]["of"]) == (3, 4)
    assert (found["false_alarms"]["of"], found["weak"], found["not_measured"]) == (1, 1, 1)
    assert found["off_worst"] == pytest.approx(2)
    assert found["kinds"]["barriers"]["first"]["of"] == 1


def test_interval_of_a_rate_is_wide_for_few_cases():
    low, high = interval(12, 12)
    assert 0.7 < low < 0.8
    assert high == 1
    assert interval(0, 0) == (0, 1)
