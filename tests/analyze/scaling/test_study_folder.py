"""The folder of a study: written and read back, points from runs, derived figures."""

import dataclasses
import json
import math

import pytest

from paceline.analyze.scaling.derived import estimate, scaling, throughput
from paceline.analyze.scaling.study_folder import (
    FORMAT,
    VERSION,
    PlannedPoint,
    StoredStudy,
    read_study,
    store_predictions,
    write_run,
    write_study,
)
from paceline.analyze.scaling.study_model import (
    KNOB,
    STRONG,
    WEAK,
    BatchSource,
    Prediction,
    RunFigures,
    Setup,
    Spread,
    StateSeconds,
    StudyRequest,
    StudyRun,
)

REQUEST = StudyRequest("train.py", ["--lr", "0.1"], "/tmp", [STRONG, WEAK], [1, 2])
POINTS = [
    PlannedPoint(STRONG, Setup(1, 64)),
    PlannedPoint(STRONG, Setup(2, 64)),
    PlannedPoint(WEAK, Setup(1, 64)),
    PlannedPoint(WEAK, Setup(2, 128)),
]


def figures(step_s: float, samples: int, useful: float = 0.8) -> RunFigures:
    seconds = StateSeconds(useful=useful * step_s, wait=(1 - useful) * step_s)
    pop = {"parallel": useful, "useful": useful, "serialisation": None}
    spread = Spread([useful * step_s], [useful * step_s])
    steps = [step_s] * 8
    return RunFigures(3, 2, True, steps, samples, samples, seconds, pop, spread)


def run(folder, setup: Setup, repeat: int, taken: RunFigures | None, failure: str = "") -> None:
    name = f"runs/{setup.name}-{repeat}"
    (folder / name).mkdir(parents=True)
    started = 100.0 * setup.ranks + repeat
    write_run(folder, StudyRun(name, setup, repeat, taken, failure, started=started))


def make_study(folder):
    write_study(folder, StoredStudy(FORMAT, VERSION, REQUEST, BatchSource(KNOB, 64), POINTS))
    for repeat in range(3):
        run(folder, Setup(1, 64), repeat, figures(0.1 + repeat / 1000, 64))
    run(folder, Setup(2, 64), 0, figures(0.0625, 64, 0.5))
    run(folder, Setup(2, 128), 0, None, "OSError: no space")


def test_study_is_read_as_written(tmp_path):
    make_study(tmp_path)
    study = read_study(tmp_path)
    assert study.request == REQUEST
    assert [(p.kind, p.ranks, len(p.runs)) for p in study.points] == [
        *((STRONG, 1, 3), (STRONG, 2, 1), (WEAK, 1, 3), (WEAK, 2, 0))
    ]
    assert study.of_kind(WEAK)[1].failure == "OSError: no space"
    assert study.of_kind(STRONG)[0].figures[0] == figures(0.1, 64)


def test_scaling_efficiency_is_the_ratio_of_global_efficiencies(tmp_path):
    make_study(tmp_path)
    first, second = scaling(read_study(tmp_path), STRONG)
    assert first.efficiency.value == 1
    assert second.speedup.value == pytest.approx((64 / 0.0625) / (64 / 0.101))
    assert second.efficiency.value == pytest.approx(
        second.global_efficiency / first.global_efficiency
    )
    assert second.efficiency.low < second.efficiency.value < second.efficiency.high


def test_interval_is_of_the_runs():
    one = estimate([10.0])
    assert (one.low, one.high, one.is_between_runs) == (0.0, math.inf, False)
    several = estimate([10.0, 11.0, 10.5])
    assert several.low < 10 < 10.5 == several.value < 11 < several.high


def test_damaged_run_is_left_out_and_named(tmp_path):
    make_study(tmp_path)
    (tmp_path / "runs/n1-b64-1/figures.json").write_text('{"format": "paceline-scaling-study"}')
    study = read_study(tmp_path)
    assert len(study.of_kind(STRONG)[0].runs) == 2
    assert "n1-b64-1" in study.notes[0]


def test_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"not the folder of a scaling study.*HINT"):
        read_study(tmp_path)
    write_study(tmp_path, StoredStudy(FORMAT, VERSION + 1, REQUEST))
    with pytest.raises(ValueError, match=r"version 2\).*HINT: update"):
        read_study(tmp_path)
    tree = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps(tree | {"version": 1, "request": {}}))
    with pytest.raises(ValueError, match=r"does not match its format"):
        read_study(tmp_path)


def test_prediction_is_held_only_against_later_runs(tmp_path):
    make_study(tmp_path)
    later = Prediction(STRONG, 4, 64, 1500.0, 1400.0, 1600.0, "usl", [1, 2], 0.0)
    known = Prediction(STRONG, 2, 64, 1000.0, 900.0, 1100.0, "usl", [1], 0.0)
    store_predictions(tmp_path, [later, known])
    study = read_study(tmp_path)
    assert [p.ranks for p in study.predictions] == [4]
    run(tmp_path, Setup(4, 64), 0, figures(0.03, 64))
    write_study(
        tmp_path,
        StoredStudy(FORMAT, VERSION, REQUEST, None, [PlannedPoint(STRONG, Setup(4, 64))]),
    )
    assert not read_study(tmp_path).points[0].predicted  # the run started before
    made = study.predictions[0].made
    late = StudyRun("runs/n4-b64-0", Setup(4, 64), 0, figures(0.03, 64), started=made + 1)
    write_run(tmp_path, late)
    assert read_study(tmp_path).points[0].predicted == [dataclasses.replace(later, made=made)]
    assert throughput(read_study(tmp_path).points[0]).value == pytest.approx(64 / 0.03)
