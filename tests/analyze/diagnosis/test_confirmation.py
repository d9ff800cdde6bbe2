"""Causes are confirmed by experiments before they are named, and share no time."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rungs import rung

from paceline.analyze.diagnosis.causes import (
    Cause,
    causes,
    operator_causes,
    unconfirmed_causes,
    without_overlap,
)
from paceline.analyze.diagnosis.confirmation import Witness, verdict
from paceline.analyze.diagnosis.evidence import Evidence
from paceline.analyze.diagnosis.rules.operators import Finding
from paceline.analyze.diagnosis.rungs import BARS, Interval, waterfall
from paceline.analyze.diagnosis.table import INDICATORS
from paceline.analyze.figures.losses import Loss
from paceline.record.experiments.rung import NO_COLLECTION, THREADS_PAUSED

FACTS = {"threads": 1, "mask": "3", "host_cores": 2, "fault_s": 2e-6}
FACTS |= {"product_s": {"float32": 0.001, "float64": 0.002}, "parameters": {"float32": 4_000_000}}
COLLECTING = {"collecting": {"seconds": 0.4, "count": 10, "file": "/home/me/train.py", "line": 9}}


def evidence(*, losses=(), facts=FACTS, savings=None, **changed):
    names = ("alone", "silent", "cached", "everything")
    rungs = {name: rung(ranks=1 if name == "alone" else 2) for name in names} | changed
    fall = waterfall(*(rungs[name] for name in names))
    state = {"useful": 1 - sum(loss.share for loss in losses), "starved": 0.0, "other": 0.0}
    report = SimpleNamespace(
        losses=list(losses), groups=[], hosts=["a", "b"], states=[state, state], size=2
    )
    return Evidence(
        *(fall, report, None, 1, 2, 2, 10, rungs), facts=[facts, facts], savings=savings or {}
    )


NONE = Interval(0.0, -0.01, 0.01)
CLEAR, SMALL = Interval(0.2, 0.15, 0.25), Interval(0.03, 0.01, 0.05)
WIDE = Interval(0.215, 0.03, 0.4)  # once named before a cause that was known to 2 %
FEW, ONE = Interval(0.4, -0.3, 1.1), Interval(0.4, -math.inf, math.inf)  # two rounds, one round
VERDICTS = [
    ("exchange", CLEAR, 0.2, "confirmed"),
    ("exchange", CLEAR, 0.01, ""),  # the two witnesses contradict each other
    ("exchange", None, 0.2, "not-testable"),  # no communication could be switched off
    ("exchange", FEW, 0.3, "not-testable"),  # too few rounds, and the record agrees
    ("metrics", FEW, 0.3, "not-testable"),
    ("exchange", ONE, 0.3, "not-testable"),
    ("exchange", FEW, 0.06, ""),
    ("exchange", NONE, 0.3, ""),
    ("collector", FEW, 0.3, "not-confirmed"),
    ("sharing", FEW, None, ""),
    ("sharing", CLEAR, None, "confirmed"),
    ("sharing", NONE, None, ""),
    ("layout", CLEAR, None, "confirmed"),
    ("layout", WIDE, None, "not-confirmed"),
    ("layout", SMALL, None, ""),
    ("collector", CLEAR, 0.01, "confirmed"),  # a short time in many places costs more than itself
    ("collector", NONE, 0.3, "not-confirmed"),
    ("allocator", NONE, 0.3, "not-confirmed"),
    ("allocator", WIDE, 0.3, "not-confirmed"),
    ("allocator", CLEAR, 0.3, "confirmed"),
    ("allocator", None, 0.3, "not-testable"),
    ("interpreter", SMALL, 0.01, ""),
    ("interpreter", NONE, 0.2, "not-confirmed"),
    ("script", None, 0.2, "not-testable"),
    ("script", None, 0.01, ""),
]


@pytest.mark.parametrize(("name", "ladder", "record", "expected"), VERDICTS)
def test_verdict_of_experiment_and_record(name, ladder, record, expected):
    assert verdict(Witness(name, ladder, record)) == expected


def test_share_of_a_bar_with_too_few_rounds_is_that_of_the_record():
    witness = Witness("exchange", FEW, 0.3)
    assert (witness.share, witness.interval, witness.basis) == (0.3, (0.3, 0.3), "record")


def test_every_witness_has_an_experiment_or_a_record():
    tested = {name for name, one in INDICATORS.items() if one.experiment is not None}
    assert tested <= INDICATORS.keys() - set(BARS)


def test_page_faults_that_cost_nothing_are_no_cause():
    """Page faults take a fifth of the step by formula, and keeping the memory saves nothing."""
    faulting = {"silent": rung(faults=100_000.0, system=0.3)}
    (estimated,) = causes(evidence(**faulting))
    assert (estimated.id, estimated.confirmed) == ("allocator", "not-testable")
    assert estimated.basis == "estimate"
    tested = evidence(**faulting, **{"memory kept": rung()})
    assert causes(tested) == []
    (refuted,) = unconfirmed_causes(tested)
    assert (refuted.id, refuted.confirmed) == ("allocator", "not-confirmed")
    assert refuted.share == pytest.approx(0.2, abs=0.01)
    assert refuted.measured.mean == pytest.approx(0, abs=0.01)
    (confirmed,) = causes(evidence(**faulting, **{"memory kept": rung(0.06)}))
    assert (confirmed.confirmed, confirmed.basis) == ("confirmed", "experiment")
    assert confirmed.share == pytest.approx(0.4, abs=0.01)  # as measured, not as estimated
    assert confirmed.evidence["expected"] == pytest.approx(0.2, abs=0.01)


def test_estimates_are_ranked_after_what_was_measured():
    double = FACTS | {"parameters": {"float64": 8}}
    found = causes(evidence(losses=[Loss("other", 0.1)], facts=double))
    assert [(one.id, one.basis) for one in found] == [
        ("script", "record"),
        ("precision", "estimate"),
    ]
    single = {"float32 instead of float64": rung(0.06)}
    found = causes(evidence(losses=[Loss("other", 0.1)], facts=double, **single))
    assert [(one.id, one.confirmed) for one in found] == [
        ("precision", "confirmed"),
        ("script", "not-testable"),
    ]


def test_garbage_collection_and_its_line_are_one_cause():
    line = {"file": "train.py", "line": 9, "code": "gc.collect()", "share": 0.95}
    e = evidence(
        losses=[Loss("other", 0.4, lines=[line])],
        everything=rung(**COLLECTING),
        savings={NO_COLLECTION: [0.58, 0.6, 0.62, 0.6]},
    )
    (cause,) = causes(e)
    assert (cause.id, cause.confirmed) == ("garbage-collection", "confirmed")
    assert cause.share == pytest.approx(0.6)
    assert "runs 1 time per step, mostly in train.py:9" in cause.sentence
    assert cause.evidence["signs"] == [{"id": "script", "share": 0.4}]
    untested = replace(e, savings={})
    assert [one.confirmed for one in causes(untested)] == ["not-testable"]


def test_other_work_of_the_script_beside_garbage_collection_remains_a_cause():
    lines = [
        {"file": "train.py", "line": 9, "code": "gc.collect()", "share": 0.5},
        {"file": "train.py", "line": 12, "code": "plot()", "share": 0.5},
    ]
    found = causes(
        evidence(
            losses=[Loss("other", 0.4, lines=lines)],
            everything=rung(**COLLECTING),
            savings={NO_COLLECTION: [0.24, 0.25, 0.26, 0.25]},
        )
    )
    assert [one.id for one in found] == ["garbage-collection", "script"]
    assert found[1].share == pytest.approx(0.2)


def test_threads_that_compute_but_do_not_disturb_are_no_cause():
    busy = {"silent": rung(thread=0.3, others={"seconds": 0.6, "name": "monitor"})}
    e = evidence(**busy, savings={THREADS_PAUSED: [0.01, -0.01, 0.0, 0.01]})
    assert causes(e) == []
    assert [one.id for one in unconfirmed_causes(e)] == ["interpreter"]
    e = replace(e, savings={THREADS_PAUSED: [0.41, 0.39, 0.4, 0.42]})
    (cause,) = causes(e)
    assert (cause.id, cause.confirmed) == ("interpreter", "confirmed")


def test_experiment_that_switched_nothing_off_does_not_refute_the_record():
    """A script without a torch DataLoader: no batch could be cached."""
    uncached = [replace(one, cached=0) for one in rung()]
    (cause,) = causes(evidence(losses=[Loss("input", 0.3)], cached=uncached))
    assert (cause.id, cause.confirmed, cause.basis) == ("input", "not-testable", "record")
    cached = rung(0.0999)
    assert causes(evidence(losses=[Loss("input", 0.3)], cached=cached)) == []


def generated(seed):
    """Return evidence of random rungs, savings and losses; most of them contradict each other."""
    pick = random.Random(seed)

    def one(ranks=2, low=0.2):
        collecting = {"seconds": pick.random() / 2, "count": 3, "file": "train.py", "line": 4}
        used = {
            "collecting": collecting, "faults": pick.random() * 2e5, "system": pick.random(),
            "squeezed": pick.random() * 0.3, "process": pick.random() + 0.3,
            "thread": pick.random(), "others": {"seconds": pick.random(), "name": "monitor"},
            "delayed": pick.random() * 0.2, "host": pick.random() * 3, "searching": 0.1,
        }  # fmt: skip
        return rung(pick.uniform(low, 1), ranks=ranks, slow=pick.uniform(1, 2), **used)

    steps = {"everything": rung(1.0), "alone": one(1), "silent": one(), "cached": one(low=0.5)}
    if pick.random() < 0.5:
        steps["everything"] = one(low=0.8)
    for name in ("one thread", "alone, channels-last", "memory kept", "float32 instead of float64"):
        if pick.random() < 0.5:
            steps[name] = one(1 if name.startswith("alone") else 2)
    switched = [name for name in (NO_COLLECTION, THREADS_PAUSED) if pick.random() < 0.6]
    savings = {name: [pick.uniform(0.3, 0.9)] * 2 + [pick.uniform(0, 0.9)] for name in switched}
    line = {"file": "train.py", "line": pick.choice([4, 5]), "code": "x()", "share": pick.random()}
    rest, losses = 1.0, []
    for kind in ("other", "input", "validation", "checkpoint"):
        share = rest * pick.random() / 2
        rest -= share
        losses.append(Loss(kind, share, lines=[line]))
        losses.append(Loss("wait", share / 2, 1, "b", pick.choice([kind, "useful"])))
    sizes = {"parameters": {pick.choice(["float64", "float32"]): 8}}
    sizes["ddp"] = {"searches": pick.random() < 0.5, "bytes": 8, "bucket_bytes": 8}
    return evidence(losses=losses, facts=FACTS | sizes, savings=savings, **steps)


def test_shares_of_generated_evidence_add_up_to_what_is_lost():
    several = 0
    for seed in range(400):
        e = generated(seed)
        found = causes(e)
        several += len(found) > 2
        assert len({one.id for one in found}) == len(found)
        assert all(0.05 <= one.share <= 1 for one in found), seed
        assert sum(one.share for one in found) <= 1 + 1e-9, seed
        lost = sum(max(bar.of_step.mean, 0) for bar in e.waterfall.bars)
        bars = [one for one in found if one.witness in BARS and one.basis == "experiment"]
        assert sum(one.share for one in bars if one.id != "noisy-machine") <= lost + 1e-9, seed
        estimates = [one.basis == "estimate" for one in found]
        assert estimates == sorted(estimates), seed
        assert not {one.confirmed for one in found} - {"confirmed", "not-testable"}
        assert all(one.confirmed == "not-confirmed" for one in unconfirmed_causes(e))
    assert several > 100


def test_no_share_of_generated_evidence_exceeds_a_step():
    """Rungs that contradict each other: without communication, steps are twice as long."""
    for seed in range(200):
        e = generated(seed)
        pick = random.Random(seed)
        most = {"squeezed": 3 * pick.random(), "system": 5.0, "faults": 1e7, "searching": 0.8}
        rungs = e.rungs | {
            "silent": rung(pick.uniform(0.5, 2), slow=pick.uniform(0.5, 2), **most),
            "everything": rung(pick.uniform(0.3, 1), slow=pick.uniform(0.5, 2), **most),
        }
        names = ("alone", "silent", "cached", "everything")
        e = replace(e, rungs=rungs, waterfall=waterfall(*(rungs[name] for name in names)))
        found = causes(e)
        assert sum(one.share for one in found) <= 1 + 1e-9, seed
        for one in (*found, *unconfirmed_causes(e)):
            assert 0 < one.share <= 1, (seed, one)
            assert one.interval[1] <= 1, (seed, one)


def test_operators_take_at_most_what_other_causes_leave():
    def finding(name, share):
        return Finding(name, share, "", "")

    known = Cause("script", 0.7, (0.7, 0.7), "")
    found = operator_causes([finding("copies", 0.8), finding("small-operators", 0.2)], [known])
    assert [one.share for one in found] == pytest.approx([0.3, 0.2])
    assert [one.interval for one in found] == [(0.0, pytest.approx(0.3)), (0.0, 0.2)]
    whole = Cause("script", 0.97, (0.97, 0.97), "")
    assert operator_causes([finding("copies", 0.8)], [whole]) == []


def test_more_reliable_cause_keeps_the_time():
    def cause(name, share, basis):
        return Cause(name, share, (share, share), "", basis=basis, witness=name)

    all_of_it = [
        cause("precision", 0.5, "estimate"),
        cause("exchange", 0.5, "experiment"),
        cause("collector", 0.6, "experiment"),
        cause("script", 0.3, "record"),
    ]
    slower = {"silent": rung(0.05), "alone": rung(0.05, ranks=1)}
    found = without_overlap(all_of_it, evidence(**slower))
    shares = {one.id: round(one.share, 3) for one in found}
    assert shares == {"collector": 0.6, "exchange": 0.4}
    assert [one["id"] for one in found[0].evidence["signs"]] == ["script", "precision"]


def test_pairs_of_signs_are_of_known_witnesses():
    assert {name for one in INDICATORS.values() for name in one.overlaps} <= INDICATORS.keys()
