"""The cause of waits between the stages of a pipeline, and its remedies."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rungs import rung

from paceline.analyze.diagnosis.causes import causes
from paceline.analyze.diagnosis.evidence import Evidence
from paceline.analyze.diagnosis.rungs import waterfall
from paceline.analyze.figures.losses import Loss
from paceline.analyze.figures.pipeline import PipelineFigures
from paceline.predict.remedies import remedies

RUNGS = {"alone": rung(ranks=1), "silent": rung(), "cached": rung(), "everything": rung()}
EVEN = PipelineFigures("1f1b", 2, 4, bubble=0.25, formula=0.2, stage_s=[0.04, 0.04], slowest=None)
STAGES = {rank: {"stage": rank} for rank in range(2)}


def proposed(pipeline=EVEN, samples=1000, mesh=STAGES):
    """Return causes and remedies of ten steps, a quarter of which is the bubble."""
    share = pipeline.bubble if pipeline is not None else 0.0
    report = SimpleNamespace(
        losses=[Loss("bubble", share, 0)] if share else [], groups=[], hosts=["a", "a"],
        ranks=[0, 1], states=[{"useful": 1 - share, "other": 0.0, "starved": 0.0}] * 2,
        size=len(mesh),
        samples=samples, pipeline=pipeline, mesh=mesh,
    )  # fmt: skip
    e = Evidence(
        waterfall=waterfall(*RUNGS.values()), report=report, loader=None, threads=1, cores=2,
        per_host=2, steps=10, rungs=RUNGS, facts=[{}, {}],
    )  # fmt: skip
    found = causes(e)
    return found, {remedy.knob: remedy for remedy in remedies(e, found, "", {})}


def test_the_bubble_is_named_beside_its_formula_with_remedies():
    (cause,), found = proposed()
    assert cause.id == "pipeline-bubble"
    assert cause.share == pytest.approx(0.25)
    assert cause.sentence == (
        "the stages of the pipeline wait for each other for 25% of their time, 20% by the formula "
        "of 1f1b with 2 stages and 4 micro-batches"
    )
    assert found.keys() == {"micro-batches", "pipeline-schedule"}
    assert "micro-batches=8 in the layout" in found["micro-batches"].edit
    assert found["micro-batches"].value == 8
    assert all(one.settable for one in found.values())
    saved = 1 / 5 - 1 / 9
    assert found["micro-batches"].gain.mean == pytest.approx(saved / (1 - saved), rel=0.01)
    assert "schedule=zero-bubble" in found["pipeline-schedule"].edit


def test_the_stage_to_relieve_and_the_modules_to_move_are_named():
    uneven = replace(EVEN, bubble=0.5, stage_s=[0.06, 0.02], slowest=0, balance=["1"])
    (cause,), found = proposed(uneven)
    assert "and stage 0 computes longest" in cause.sentence
    assert "balance='1'" in found["pipeline-balance"].edit


def test_what_can_not_help_is_not_proposed():
    assert "micro-batches" not in proposed(samples=50)[1]  # 5 samples in a step
    zero_bubble = replace(EVEN, schedule="zero-bubble", formula=1 / 13)
    assert "pipeline-schedule" not in proposed(zero_bubble)[1]
    assert proposed(None) == ([], {})


def test_a_remedy_saves_no_more_than_the_bubble():
    short = replace(EVEN, bubble=0.05, formula=0.2)  # of stages that overlap their messages
    for one in proposed(short)[1].values():
        assert one.gain.mean <= 0.05 / 0.95 + 1e-9


def test_samples_are_those_of_the_data_ranks():
    """Ranks of the tensor axis train the same samples: 10 of a step suffice for 8 micro-batches."""
    mesh = {rank: {"stage": rank // 2, "tensor": rank % 2} for rank in range(4)}
    found = proposed(samples=100, mesh=mesh)[1]
    assert "micro-batches" in found
    assert "pipeline-schedule" not in found  # zero-bubble with a tensor axis is refused
