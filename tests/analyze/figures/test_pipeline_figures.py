"""Records of pipelines with known bubbles: the state, its factor, the slowest stage, the page."""

import pytest
from records import Rank, report_of

from paceline.analyze.figures.pop import LOSSES
from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.records.load_run import Run
from paceline.record.ring.states import Op, State
from paceline.report.page.run_page import single
from paceline.report.terminal.run_report import render

AXES = [("data", 1), ("stage", 2)]


def pipeline(folder, balance=(), kernels=False):
    """Two stages and two micro-batches in each step of 100 ms; the first stage computes longer.

    Rank 0: F0 0-20, F1 20-40, waits to 50, B0 50-70, B1 70-100. Rank 1 waits to 20, computes F0
    to 30, waits to 40, then F1, B0 (to 50) and B1 to 60, and waits for the end of rank 0's step.

    Args:
        kernels: A GPU computes; forwards and backwards launch its kernels in 1 ms.
    """

    def computes(rank, state, start, end, number):
        rank.was(state, start, start + 1 if kernels else end, seq=number)
        if kernels:
            rank.was(State.KERNEL, start, end)

    about = {"schedule": "gpipe", "stages": 2, "micro_batches": 2, "balance": list(balance)}
    ranks = []
    for stage in range(2):
        mesh = {"axes": AXES, "place": [0, stage], "groups": {"g": "stage (data 0)"}}
        groups = {"0": (2, stage), "g": (2, stage)}
        ranks.append(Rank(folder, stage, 2, groups=groups, mesh=mesh, pipeline=about))
        ranks[-1].step(0, 100, number=0)
    first, second = ranks
    for step in (1, 2, 3):
        t = 100 * step
        for state, start, end, number in (
            *((State.FORWARD, 0, 20, 1), (State.FORWARD, 20, 40, 2)),
            *((State.BACKWARD, 50, 70, 1), (State.BACKWARD, 70, 100, 2)),
        ):
            computes(first, state, t + start, t + end, number)
        for state, start, end, number in (
            *((State.FORWARD, 20, 30, 1), (State.FORWARD, 40, 45, 2)),
            *((State.BACKWARD, 45, 50, 1), (State.BACKWARD, 50, 60, 2)),
        ):
            computes(second, state, t + start, t + end, number)
        number = 2 * step
        first.message(t + 20, t + 20, t + 20, Op.SEND, 1, number, group="g")
        first.message(t + 40, t + 40, t + 40, Op.SEND, 1, number + 1, group="g")
        second.message(t, t, t + 20, Op.RECV, 0, number, group="g")
        second.message(t + 30, t + 30, t + 40, Op.RECV, 0, number + 1, group="g")
        second.message(t + 50, t + 50, t + 50, Op.SEND, 0, number + 100, group="g")
        first.message(t + 40, t + 40, t + 50, Op.RECV, 1, number + 100, group="g")
        first.collective(t + 99, t + 100, t + 100, op=Op.ALL_GATHER, group="g")
        second.collective(t + 60, t + 60, t + 100, group="g", op=Op.ALL_GATHER)
        for rank in ranks:
            rank.step(t, t + 100, samples=4, number=step)
    return ranks


def test_waits_for_other_stages_are_the_state_bubble(tmp_path):
    report = report_of(pipeline(tmp_path))
    first, second = report.states
    assert first["bubble"] == pytest.approx(0.1)
    assert second["bubble"] == pytest.approx(0.69, abs=0.02)
    assert first["wait"] == second["wait"] == 0
    e = report.efficiencies
    product = e.parallel
    for name in LOSSES:
        product *= getattr(e, name)
    assert product == pytest.approx(e.useful)
    assert e.bubble == pytest.approx(1 - (first["bubble"] + second["bubble"]) / 2 / e.parallel)
    assert sum(loss.share for loss in report.losses) == pytest.approx(1 - e.useful)
    assert report.losses[0].kind == "bubble"
    assert report.slowest_rank == 0  # the bubble is no time of its own


def test_the_bubble_stands_beside_its_formula_and_the_stage_to_relieve_is_named(tmp_path):
    report = report_of(pipeline(tmp_path, balance=["1"]))
    found = report.pipeline
    assert found.formula == pytest.approx(1 / 3)
    assert found.stage_s == pytest.approx([0.09, 0.03])
    assert found.slowest == 0
    text = " ".join(render(report).replace("│", " ").split())
    assert "Pipeline (gpipe, 2 stages, 2 micro-batches): the bubble takes" in text
    assert "33.3 % by the formula" in text
    assert "the others wait for stage 0. HINT: balance=['1']" in text
    assert "bubble" in text
    assert "balance=['1']" in text.partition("wall time")[0]  # what to do next


def test_on_gpus_stages_compute_in_kernels(tmp_path):
    found = report_of(pipeline(tmp_path, kernels=True)).pipeline
    assert found.stage_s[0] > 2 * found.stage_s[1]  # the window ends with the last kernel of rank 1
    assert found.slowest == 0
    assert 0.3 < found.bubble < 0.6


def test_the_page_has_the_schedule_as_it_ran(tmp_path):
    run = Run("test", [rank.record() for rank in pipeline(tmp_path)], missing=[])
    page = single(analyse_with_window(run))
    assert 'data-chart="schedule"' in page
    assert '"rows":["stage 0","stage 1"]' in page.replace(" ", "").replace(
        "stage0", "stage 0"
    ).replace("stage1", "stage 1")
    for name in ("F0", "F1", "B0", "B1"):
        assert f'"{name}"' in page


def test_reports_without_a_pipeline_have_no_bubble(tmp_path):
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for rank, arrived in zip(ranks, (50, 80), strict=True):
        for step in range(3):
            t = 100 * step
            rank.was(State.FORWARD, t, t + arrived)
            rank.collective(t + arrived, t + arrived, t + 90)
            rank.step(t, t + 100, number=step)
    report = report_of(ranks)
    assert report.pipeline is None
    assert report.efficiencies.bubble == 1
    assert {rank["bubble"] for rank in report.states} == {0}
    assert "bubble" not in render(report)
