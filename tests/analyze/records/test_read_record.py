"""Damaged records give either a report or an error that names the file."""

import random

import pytest
from records import Rank

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run
from paceline.record.ring.ring import HEADER_BYTES
from paceline.record.ring.states import State


def made(folder):
    ranks = [Rank(folder, rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.step(0, 10)
        for step in range(20):
            begin = 10 + 20 * step
            rank.was(State.FORWARD, begin, begin + 10)
            rank.collective(begin + 10, begin + 10, begin + 15, amount=1000)
            rank.step(begin, begin + 20, samples=1, number=step + 1)
    for rank in ranks:  # as the launcher stores it, without the unused slots
        rank.path.write_bytes(rank.ring.snapshot())
    return ranks


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_gives_a_report_or_a_named_error(tmp_path, seed):
    draw = random.Random(seed)
    path = draw.choice(made(tmp_path)).path
    data = bytearray(path.read_bytes())
    kind = draw.choice(["header", "events", "cut", "longer"])
    if kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "longer":
        data += draw.randbytes(1000)
    else:
        first, last = (0, 400) if kind == "header" else (HEADER_BYTES, len(data))
        for _ in range(draw.choice([1, 5, 50])):
            data[draw.randrange(first, last)] = draw.randrange(256)
    path.write_bytes(data)
    report, refusal = None, ""
    try:
        report = analyse(load_run(tmp_path))
    except ValueError as error:
        refusal = str(error)
    if report is None:
        assert str(tmp_path) in refusal
    else:
        assert all(sum(rank.values()) == pytest.approx(1) for rank in report.states)


def test_damaged_events_are_counted_and_lower_confidence(tmp_path):
    path = made(tmp_path)[1].path
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 5 * 40 + 34] = 200  # an invalid state
    path.write_bytes(data)
    report = analyse(load_run(tmp_path))
    assert "1 event of rank 1 is damaged and ignored" in report.doubts
    assert report.confidence < 1
