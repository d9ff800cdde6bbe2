"""Predictions of sizes are stored before their first run, and held against it."""

import os
import time

from paceline.analyze.scaling.forecast import COST_MODEL
from paceline.analyze.scaling.study_folder import (
    FORMAT,
    VERSION,
    PlannedPoint,
    StoredStudy,
    read_predictions,
    read_study,
    write_run,
    write_study,
)
from paceline.analyze.scaling.study_model import (
    KNOB,
    STRONG,
    BatchSource,
    RunFigures,
    Setup,
    Spread,
    StateSeconds,
    StudyRequest,
    StudyRun,
)
from paceline.study.scale.run_study import predict_larger, predict_setup

SIZES = (1, 2, 4, 8)


def folder_of_study(folder):
    request = StudyRequest("train.py", [], os.getcwd(), [STRONG], list(SIZES))
    points = [PlannedPoint(STRONG, Setup(n, 64)) for n in SIZES]
    write_study(folder, StoredStudy(FORMAT, VERSION, request, BatchSource(KNOB, 64), points))
    return folder


def measure(folder, ranks, mean=64):
    """Write a run of a script with 64 ms of computing for the global batch, and 4 ms of a step.

    mean: Mean samples of a step; smaller where the last batch of an epoch is.
    """
    step_s = 0.064 / ranks + 0.004
    seconds = StateSeconds(useful=step_s)
    figures = RunFigures(2, 1, True, [step_s] * 20, mean, 64, seconds, {"useful": 1.0}, Spread())
    name, setup = f"runs/{ranks}", Setup(ranks, 64)
    (folder / name).mkdir(parents=True)
    write_run(folder, StudyRun(name, setup, 0, figures, started=time.time()))


def test_a_size_is_predicted_before_it_is_measured_and_held_against_it(tmp_path):
    folder = folder_of_study(tmp_path)
    for ranks in SIZES:
        predict_setup(folder, Setup(ranks, 64))
        measure(folder, ranks)
    held = {point.ranks: point.predicted for point in read_study(folder).points}
    assert not held[1]
    assert not held[2]
    one = next(one for one in held[8] if one.model == COST_MODEL)
    assert one.sizes == [1, 2, 4]
    assert one.low < 64 / 0.012 < one.high
    assert held[4]


def test_a_smaller_last_batch_of_an_epoch_does_not_hide_the_prediction(tmp_path):
    folder = folder_of_study(tmp_path)
    for ranks in SIZES:
        predict_setup(folder, Setup(ranks, 64))
        measure(folder, ranks, mean=58.5)
    held = {point.ranks: point.predicted for point in read_study(folder).points}
    one = next(one for one in held[8] if one.model == COST_MODEL)
    assert one.low < 58.5 / 0.012 < one.high


def test_the_next_two_sizes_are_predicted_once(tmp_path):
    folder = folder_of_study(tmp_path)
    for ranks in SIZES[:3]:
        measure(folder, ranks)
    assert {one.ranks for one in predict_larger(folder)} == {8, 16}
    assert not predict_larger(folder)
    assert not predict_setup(folder, Setup(8, 64))  # the same prediction
    before = read_predictions(folder)
    measure(folder, 8)
    assert {one.ranks for one in predict_larger(folder)} == {16, 32}
    assert read_predictions(folder)[: len(before)] == before


def test_a_size_that_was_measured_is_not_predicted_any_more(tmp_path):
    folder = folder_of_study(tmp_path)
    for ranks in SIZES:
        measure(folder, ranks)
    predict_setup(folder, Setup(8, 64))
    assert not read_predictions(folder)
