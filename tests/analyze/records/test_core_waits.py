"""Waits for a core are taken out of the states in which they lay; all figures still add up."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from records import MS, Rank, report_of

from paceline.analyze.diagnosis.confirmation import Witness
from paceline.analyze.diagnosis.rungs import Interval
from paceline.analyze.figures.pop import LOSSES
from paceline.analyze.records.core_waits import OtherThreads
from paceline.analyze.records.state_timeline import STATES, Window, build_timeline
from paceline.record.ring.states import CoreWait, State
from paceline.report.diagnosis.diagnosis_document import waits_for_cores
from paceline.report.sentences import core_wait_sentence, sentence
from paceline.report.terminal.run_report import render


def timeline(rank, start=0, end=100):
    record = rank.record()
    blocked = record.events_in(State.BLOCKED)
    return build_timeline(record, blocked["start"], Window(start * MS, end * MS))


def in_ms(states):
    return {name: ns / MS for name, ns in states.items() if ns}


def test_delay_is_divided_among_the_states_between_two_readings(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.was(State.INPUT, 0, 20)
    rank.was(State.FORWARD, 20, 80)
    rank.was(State.STARVED, 0, 100, amount=50 * MS)
    line = timeline(rank)
    assert in_ms(line.states) == {"input": 10, "useful": 30, "other": 10, "starved": 50}
    assert in_ms(line.starved_in) == {"input": 10, "useful": 30, "other": 10}
    times = [5 * MS, 15 * MS, 25 * MS, 75 * MS]
    at = [STATES[i] for i in line.label[np.searchsorted(line.edges, times, "right") - 1]]
    assert at == ["input", "starved", "useful", "starved"]  # at the end of each
    assert [STATES[i] for i in line.underlying_at([15 * MS, 75 * MS])] == ["input", "useful"]


def test_blocked_rank_waits_for_no_core(tmp_path):
    rank = Rank(tmp_path, 0, 2)
    rank.was(State.BACKWARD, 0, 40)
    rank.collective(40, 40, 100)
    rank.was(State.STARVED, 30, 100, amount=20 * MS)
    found = in_ms(timeline(rank).states)
    assert found == {"useful": 30, "starved": 10, "transfer": 60}


def test_gpu_computes_while_its_thread_has_no_core(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.was(State.KERNEL, 0, 60)
    rank.was(State.STARVED, 0, 100, amount=50 * MS)
    assert in_ms(timeline(rank).states) == {"useful": 60, "other": 20, "starved": 20}


@pytest.mark.parametrize("amount", [200, 2**52 // MS])
def test_damaged_delay_is_bounded_by_its_interval(tmp_path, amount):
    rank = Rank(tmp_path, 0, 1)
    rank.was(State.FORWARD, 0, 100)
    rank.was(State.STARVED, 10, 30, amount=amount * MS)
    rank.was(State.STARVED, 20, 40, amount=amount * MS)  # overlaps
    rank.was(State.STARVED, 90, 130, amount=20 * MS)  # ends after the window
    assert in_ms(timeline(rank).states) == {"useful": 65, "starved": 35}


@pytest.mark.parametrize("seed", range(10))
def test_identities_with_random_delays(tmp_path, seed):
    draw = random.Random(seed)
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    kinds = (State.INPUT, State.FORWARD, State.VALIDATION, State.CHECKPOINT, State.OPTIMIZER)
    for rank in ranks:
        rank.step(0, 1)
        at = 1.0
        for step in range(20):
            began = at
            for _ in range(draw.randrange(1, 8)):
                end = at + draw.uniform(0.01, 5)
                rank.was(draw.choice(kinds), at, at + draw.uniform(0, 1.2) * (end - at))
                delay = draw.uniform(0, 1.1) * (end - at)
                rank.was(State.STARVED, at, end, amount=round(delay * MS))
                at = end
            rank.step(began, at, number=step + 1)
            rank.collective(at, at, at := at + draw.uniform(0, 3))
    report = report_of(ranks)  # asserts the identities
    assert report.efficiencies.starved < 1
    product = report.efficiencies.parallel
    for name in LOSSES:
        product *= getattr(report.efficiencies, name)
    assert product == pytest.approx(sum(rank["useful"] for rank in report.states) / 2)
    lost = sum(loss.share for loss in report.losses)
    assert lost == pytest.approx(1 - report.efficiencies.useful)
    for states, starved_in in zip(report.states, report.starved_in, strict=True):
        assert sum(states.values()) == pytest.approx(1)
        assert sum(starved_in.values()) == pytest.approx(states["starved"])


def crowded(folder, steps=10):
    """Return two ranks that compute 20 ms a step; rank 1 waits 10 ms of it for a core."""
    ranks = [Rank(folder, i, 2, cores="3", threads=4) for i in range(2)]
    for i, rank in enumerate(ranks):
        rank.step(0, 1)
        for step in range(steps):
            at = 1 + 40 * step
            computed = 10 + 10 * i
            rank.was(State.FORWARD, at, at + computed)
            if i == 1:
                rank.was(State.STARVED, at, at + computed, amount=10 * MS)
            rank.collective(at + computed, at + computed, at + 40)
            rank.step(at, at + 40, number=step + 1)
        end = 1 + 40 * steps
        own = {"amount": round(1.5 * (end - 1)) * MS, "seq": 3}
        rank.was(State.OTHERS_STARVED, 1, end, peer=int(CoreWait.THREADS), **own)
    return ranks


def test_report_names_waits_for_a_core_and_the_state_they_lay_in(tmp_path):
    report = report_of(crowded(tmp_path))
    assert report.states[1]["starved"] == pytest.approx(0.25)
    assert report.starved_in[1] == {"useful": pytest.approx(0.25)}
    own = next(loss for loss in report.losses if loss.kind == "starved")
    assert (own.rank, own.doing, own.share) == (1, "useful", pytest.approx(0.125))
    wait = next(loss for loss in report.losses if loss.kind == "wait")
    assert (wait.rank, wait.doing) == (1, "starved")
    assert "which had waited for a core" in sentence(wait, report)
    assert sentence(own, report).startswith("waiting for a core, mostly while it computed; most on")
    assert report.other_threads == [OtherThreads(3.0, pytest.approx(1.5))] * 2
    assert core_wait_sentence(report) == (
        "2 ranks with 4 threads of PyTorch each share 2 cores: the training threads wait for a "
        "core 12.5 % of the time, and on average 3 other threads wait for one"
    )
    assert "core wait" in render(report)


def test_report_without_waits_for_a_core_does_not_mention_threads(tmp_path):
    rank = Rank(tmp_path, 0, 1, cores="1", threads=1)
    rank.step(0, 1)
    rank.was(State.FORWARD, 1, 50)
    rank.step(1, 50, number=1)
    report = report_of([rank])
    assert report.states[0]["starved"] == 0
    assert core_wait_sentence(report) == ""


def test_diagnosis_says_what_one_thread_per_rank_saves_only_if_measured(tmp_path):
    report = report_of(crowded(tmp_path))
    saves = Witness("threads", Interval(0.08, 0.06, 0.1), None)
    for witnesses, end in (
        ([], "3 other threads wait for one"),
        ([saves], "One thread per rank saves 8.0 % (6.0 to 10.0) of a step, as measured"),
        ([replace(saves, ladder=Interval(-0.1, -0.2, 0.0))], "saves nothing, as measured"),
    ):
        (said,) = waits_for_cores(SimpleNamespace(report=report, witnesses=witnesses))
        assert said.endswith(end)
