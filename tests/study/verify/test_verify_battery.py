"""The battery of `paceline verify`: every case is well formed, and answers are judged as stated."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from paceline.analyze.verification.find import MISTAKES

BATTERY = Path(__file__).parents[3] / "benchmarks" / "verify"
HALVES = ("open", "kept-out")


@pytest.fixture(scope="module")
def battery():
    """Import the battery's modules, which are scripts and not a package."""
    names = ("case_runs", "cases", "consequences", "draw", "verdict")
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}  # of scorecard
    sys.path.insert(0, str(BATTERY))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(BATTERY))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


@pytest.mark.parametrize("half", HALVES)
def test_every_planted_mistake_compiles_and_has_marked_lines_and_known_ids(battery, half):
    cases, known = battery["cases"], set(MISTAKES)
    found = cases.planted(half)
    assert len(found) >= 30
    for one in found:
        built = cases.strip(one.text())
        compile(built.text, one.name, "exec")
        assert "<mistake>" not in built.text
        assert built.lines
        assert {one.kind, *one.names, *one.true} <= known, one.name
        assert one.ranks in (2, 3, 4)
        if one.script:
            assert built.text != cases.path_of(one.script).read_text(), one.name


def test_edits_of_the_open_half_use_scripts_of_the_open_half_only(battery):
    cases = battery["cases"]
    right = set(cases.right_scripts("open"))
    assert {one.script for one in cases.planted("open") if one.script} <= right


def test_each_case_is_on_the_side_that_was_drawn(battery):
    cases, draw = battery["cases"], battery["draw"]
    first, second, third = (
        {f"{kind}/{way}" for kind, ways in table.items() for way in ways}
        for table in (draw.WAYS, draw.SECOND_WAYS, draw.THIRD_WAYS)
    )
    assert not first & second
    assert not (first | second) & third
    found = {half: {one.name for one in cases.planted(half)} for half in HALVES}
    assert found["kept-out"] == third
    assert found["open"] - set(draw.FOUND) == first | second
    right = {name for pair in draw.PAIRS for name in pair} | set(draw.SECOND_SCRIPTS)
    assert set(cases.right_scripts("kept-out")) == set(draw.THIRD_SCRIPTS)
    assert set(cases.right_scripts("open")) == right
    assert set(cases.SCRIPTS) == right | set(draw.THIRD_SCRIPTS)


def test_all_mistakes_are_planted_on_both_sides(battery):
    cases = battery["cases"]
    for half in HALVES:
        # A difference that has no other name is planted under the names of its causes.
        assert {one.kind for one in cases.planted(half)} == set(MISTAKES) - {"metric-differs"}
    consequences = battery["consequences"].CONSEQUENCES
    assert set(consequences) == set(MISTAKES)
    assert {name for names in consequences.values() for name in names} <= set(MISTAKES)


def answer(*findings):
    found = [
        {"mistake": name, "nature": "", "is_wrong": told == "mistake", "lines": lines, "text": ""}
        for name, told, *lines in findings
    ]
    return json.dumps({"findings": found})


@pytest.mark.parametrize(
    ("findings", "named", "placed", "accusations", "questions"),
    [
        ([("gradients-summed", "mistake", "train.py:11")], True, True, [], []),
        ([("gradients-summed", "mistake", "train.py:12")], True, False, [], []),
        ([("gradients-summed", "mistake", "other.py:10")], True, False, [], []),
        ([("gradients-summed", "mistake", "train.py:40", "train.py:10")], True, False, [], []),
        ([("gradients-differ", "mistake", "train.py:10")], False, False, [], []),
        ([("same-samples", "mistake", "train.py:10")], False, False, ["same-samples"], []),
        ([("loss-summed", "question", "train.py:10")], False, False, [], ["loss-summed"]),
        ([("loss-summed", "mistake", "train.py:10")], False, False, [], []),
        ([], False, False, [], []),
    ],
)
def test_answers_are_judged(battery, findings, named, placed, accusations, questions):
    verdict = battery["verdict"]
    case = verdict.Case(
        "a/b", "gradients-summed", ["gradients-summed"], ["loss-summed"], lines=[10]
    )
    verdict.read_answer(case, 1 if findings else 0, answer(*findings), "")
    assert case.ended
    assert (case.named, case.placed) == (named, placed)
    assert case.accusations == accusations
    assert case.questions == questions
    assert verdict.figures([case])["accused_wrongly"]["hits"] == bool(accusations)


@pytest.mark.parametrize(
    ("code", "output"),
    [(3, answer()), (None, answer()), (1, "Traceback"), (0, "[]"), (0, '{"findings": [1]}')],
)
def test_a_command_that_fails_is_no_answer(battery, code, output):
    verdict = battery["verdict"]
    case = verdict.Case("right")
    verdict.read_answer(case, code, output, "why")
    assert not case.ended
    assert case.output
    assert verdict.figures([case])["ended"] == {"hits": 0, "of": 1, "low": 0.0, "high": 0.793}


def test_any_accusation_of_a_right_script_counts(battery):
    verdict = battery["verdict"]
    case = verdict.Case("right")
    accused = [
        ("gradients-differ", "mistake", "train.py:1"),
        ("learning-rate-not-scaled", "question", "train.py:1"),
    ]
    verdict.read_answer(case, 1, answer(*accused), "")
    assert case.accusations == ["gradients-differ"]
    assert case.questions == ["learning-rate-not-scaled"]
    found = verdict.figures([case])
    assert found["accused_right"]["hits"] == found["asked_right"]["hits"] == 1


def test_cases_run_at_once_on_their_own_cores_and_are_cut_off_when_the_time_is_over(
    battery, tmp_path
):
    runs = battery["case_runs"]
    commands = runs.Commands(minutes=0.02)

    def examine(one):
        cores = "import os, time; print(sorted(os.sched_getaffinity(0))); time.sleep({})"
        command = [sys.executable, "-c", cores.format(one)]
        return one, *commands.outcome(command, tmp_path, 30)

    shares = runs.core_shares(2)
    found = list(runs.results(examine, [0, 0, 60, 60, 0], 2, commands))
    assert [(one, code) for one, code, *_ in found] == [(0, 0), (0, 0)]
    assert {output.strip() for *_, output, _ in found} <= {str(share) for share in shares}
    assert commands.is_over


def test_cores_are_divided_between_cases(battery, monkeypatch):
    runs = battery["case_runs"]
    monkeypatch.setattr(runs.os, "sched_getaffinity", lambda _: set(range(16)))
    assert runs.core_shares(8) == [[2 * at, 2 * at + 1] for at in range(8)]
    assert runs.core_shares(20) == [list(range(16))] * 20


def test_exit_codes_are_counted_apart_from_names(battery):
    judge = battery["verdict"]
    wrong, missed, right = (
        judge.Case("same-samples/a", "same-samples", ["same-samples"], lines=[3]),
        judge.Case("same-samples/b", "same-samples", ["same-samples"], lines=[3]),
        judge.Case("gan"),
    )
    told = answer(("same-samples", "mistake", "a/train.py:3"))
    judge.read_answer(wrong, 1, told, "")
    judge.read_answer(missed, 2, json.dumps({"findings": []}), "")
    judge.read_answer(right, 1, json.dumps({"findings": []}), "")
    found = judge.figures([wrong, missed, right])
    counts = {key: (found[key]["hits"], found[key]["of"]) for key in found if key[:5] == "exit_"}
    assert counts == {
        "exit_right": (1, 1),
        "exit_wrong": (1, 2),
        "exit_named": (1, 2),
        "exit_placed": (1, 2),
    }
    assert found["right_with_exit_1"] == ["gan"]
    assert found["no_verdict"]["hits"] == 1
