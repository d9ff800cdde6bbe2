"""What happens seldom: its share is of the training, and rungs are compared over steps alike."""

from types import SimpleNamespace

import pytest
from records import Rank

from paceline.analyze.diagnosis.rare_events import book_rare, pooled, survey
from paceline.analyze.diagnosis.rungs import measure_rung, waterfall
from paceline.analyze.records.load_run import Run
from paceline.record.ring.states import State
from paceline.report.diagnosis.diagnosis_document import describe_survey

STEP, COMPUTE, VALIDATION = 20, 15, 500  # ms
STEP_S, VALIDATION_S = STEP / 1e3, VALIDATION / 1e3


def run_of(folder, steps, validated=(), **facts):
    """Return a run of two ranks; rank 0 validates in some steps, and rank 1 waits for it."""
    folder.mkdir(exist_ok=True)
    ranks = [Rank(folder, number, 2, host="node", rung=facts) for number in range(2)]
    at = 1
    for rank in ranks:
        rank.step(0, at)
    for step in range(steps):
        validates = VALIDATION if step in validated else 0
        end = at + validates + STEP
        for rank, begin in zip(ranks, (at + validates, at), strict=True):
            if begin > at:
                rank.was(State.VALIDATION, at, begin)
            rank.was(State.FORWARD, begin, begin + COMPUTE)
            rank.collective(begin + COMPUTE, begin + COMPUTE, end)
            rank.step(at, end, samples=4, number=step + 1)
        at = end
    return Run("test", [rank.record() for rank in ranks], missing=[])


def test_rung_that_holds_a_validation_is_not_slower(tmp_path):
    without = measure_rung(run_of(tmp_path / "a", 20), 2, 10)
    with_it = measure_rung(run_of(tmp_path / "b", 20, validated=[5]), 2, 10)
    assert with_it.training_s == pytest.approx(without.training_s)
    assert with_it.validation_s == pytest.approx([VALIDATION_S / 10, 0])
    booked = book_rare([without, with_it], pooled([without, with_it]))
    assert booked[0].together == pytest.approx(booked[1].together)
    fall = waterfall([], booked[:1], booked[1:], booked[:1])
    shares = {bar.id: bar.of_step.mean for bar in fall.bars}
    assert shares["validation"] == pytest.approx(0.025 / (STEP_S + 0.025), abs=0.01)
    assert shares.get("exchange", 0) == pytest.approx(0, abs=1e-6)


def test_survey_reports_what_comes_with_its_share(tmp_path):
    seen = survey(run_of(tmp_path, 100, validated=[30, 60, 90], epoch_batches=30), 2)
    assert (seen.steps, seen.missing_s, seen.epoch_batches) == (99, 0, 30)
    event = next(one for one in seen.events if one.kind == "validation")
    assert (event.count, event.period) == (3, 30)
    assert seen.validation_s[0] == pytest.approx(3 * VALIDATION_S / 99)
    assert seen.losses


def test_survey_reports_what_it_did_not_reach(tmp_path):
    seen = survey(run_of(tmp_path, 20, epoch_batches=120), 2)
    assert seen.missing_s == pytest.approx((120 - 21) * STEP_S, rel=0.05)
    assert seen.events == []


def test_survey_without_rare_events_says_so():
    seen = SimpleNamespace(steps=36, seconds=4.5, events=[], missing_s=0.0)
    assert describe_survey(seen, 5.0) == [
        "36 steps of the unchanged script in 4.5 s had no validation, no checkpoint and no other "
        "event that few steps have"
    ]
