"""Runs to a target: their options, and how they ended."""

import dataclasses
import json

import numpy as np
import pytest
import ranks
from records import Rank

from paceline.analyze.records.load_run import load_run
from paceline.analyze.reference.metric import LOGGED, Metric
from paceline.analyze.reference.reference_file import RECORD_FILE, write_reference
from paceline.analyze.reference.series import Reference, Series
from paceline.analyze.scaling.study_model import STRONG, Setup, StudyRequest
from paceline.study.scale.run_setup import RunPlan, SetupRunner, target_options, target_result
from paceline.study.script_runs.run_process import Deadline
from paceline.study.study_nodes import StudyNodes
from paceline.study.trials import Trial

REQUEST = StudyRequest("a.py", [], "/tmp", [STRONG], [2], until="accuracy>=0.9")
SETUP = Setup(2, 64)


def record_of(folder, accuracies, every=10, samples=True, rate=0.1):
    """A record of 100 steps of 20 ms, with an accuracy after each ``every`` steps."""
    folder.mkdir()
    for number in range(2):
        rank = Rank(folder, number, 2)
        for step in range(100):
            rank.step(20 * step, 20 * step + 20, 32, step + 1)
        rank.path.write_bytes(rank.ring.snapshot())
    if accuracies:
        steps = np.arange(1, len(accuracies) + 1) * float(every)
        unknown = np.full(len(steps), np.nan)
        counts = steps * 64 if samples else np.zeros(len(steps))
        series = Series(steps, counts, np.array(accuracies), unknown, unknown, peak_rate=rate)
        write_reference(folder / RECORD_FILE, Reference(Metric(LOGGED, "accuracy"), [series]))
    return folder, load_run(folder)


def test_first_value_that_meets_the_goal_counts(tmp_path):
    record, run = record_of(tmp_path / "r", [0.2, 0.95, 0.85, 0.97])
    found = target_result(REQUEST, record, run, SETUP)
    assert (found.target, found.reached) == ("accuracy>=0.9", True)
    assert (found.steps, found.samples, found.seconds) == (20, 20 * 64, pytest.approx(0.4))
    assert (found.best, found.learning_rate) == (0.97, 0.1)


def test_run_that_does_not_reach_it_says_how_far_it_came(tmp_path):
    record, run = record_of(tmp_path / "r", [0.2, 0.8, float("nan")], rate=float("nan"))
    found = target_result(REQUEST, record, run, SETUP)
    assert (found.reached, found.best, found.learning_rate) == (False, 0.8, None)
    assert (found.steps, found.samples, found.seconds) == (100, 6400, pytest.approx(2.0))


def test_samples_that_the_job_did_not_count_follow_from_its_batch(tmp_path):
    record, run = record_of(tmp_path / "r", [0.2, 0.95], samples=False)
    assert target_result(REQUEST, record, run, SETUP).samples == 20 * 64


def test_run_without_a_value_has_not_reached_it(tmp_path):
    record, run = record_of(tmp_path / "r", [])
    assert target_result(REQUEST, record, run, SETUP).best is None
    assert target_result(dataclasses.replace(REQUEST, until=""), record, run, SETUP) is None


def test_options_set_the_seed_unless_the_script_takes_it():
    words = target_options(REQUEST, 2)
    assert words == [
        *("--metric", "accuracy", "--until", "accuracy>=0.9"),
        *("--env", "PACELINE_SEED_SHIFT=2"),
    ]
    takes = dataclasses.replace(REQUEST, args=["--seed={seed}"], metric=r"acc (\S+)")
    assert target_options(takes, 2) == ["--metric", r"acc (\S+)", "--until", "accuracy>=0.9"]
    assert target_options(dataclasses.replace(REQUEST, until=""), 2) == []


TRAIN = """
    import torch, paceline
    from torch.utils.data import DataLoader, TensorDataset
    world = paceline.init(progress=False)
    model = torch.nn.Linear(4, 1)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.25))
    data = TensorDataset(torch.ones(64, 4))
    loader = world.shard(DataLoader(data, 16), global_batch=16)
    for epoch in world.epochs(1000):
        for (x,) in world.batches(loader):
            world.backward(model(x).mean())
            world.step(optimizer)
        world.log(accuracy=min(0.1 * (epoch + 1), 0.95))
"""


def test_a_real_run_ends_at_its_target(tmp_path):
    script, record = ranks.write(tmp_path, TRAIN), tmp_path / "record"
    words = ranks.command(script, launcher=f"paceline --record {record}")
    words[words.index("--record") : words.index("--record")] = target_options(REQUEST, 1)
    result = ranks.run_command(words, tmp_path, ranks.environment(), 120)
    assert result.returncode == 0, result.stderr
    found = target_result(REQUEST, record, load_run(record), Setup(2, 16))
    # the ninth epoch of four steps of 16 samples
    assert (found.reached, found.steps, found.samples) == (True, 36, 576)
    assert (found.best, found.learning_rate) == (pytest.approx(0.9, abs=0.06), 0.25)
    assert found.seconds > 0


@pytest.mark.long
def test_study_to_a_target_names_the_size_that_needs_the_fewest_node_hours(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    words = [ranks.PACELINE, "scale", "-n", "1,2", "--strong", "--until", "accuracy>=0.85"]
    words += ["--seeds", "1", "--minutes", "3", "-o", "study", "--json=found.json", script.name]
    result = ranks.run_command(words, tmp_path, ranks.environment(), 300)
    assert result.returncode == 0, result.stderr
    assert "accuracy>=0.85 reached after 576 samples" in result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [size["target"]["samples"]["value"] for size in found["sizes"]] == [576, 576]
    assert found["sizes"][1]["target"]["statistical_efficiency"]["value"] == 1
    assert found["target"]["strong"]["cheapest_ranks"] in (1, 2)


class TimedOut:
    """Stands for trials that their time limit ends, with a record of two ranks until then."""

    covered = ()

    def __init__(self):
        self.deadline = Deadline.after(100)

    def run_trials(self, specs):
        (spec,) = specs
        self.options = spec.options
        record_of(spec.record, [0.2, 0.95, 0.9])
        return [Trial(spec, None, 25.0, 1.0)]


def test_run_that_its_time_limit_ends_says_how_far_it_came(tmp_path):
    (tmp_path / "runs").mkdir()
    args = ["--batch={per_rank}"]
    request = dataclasses.replace(REQUEST, args=args, until="accuracy>=0.99")
    trials = TimedOut()
    runner = SetupRunner(tmp_path, request, StudyNodes("this machine", (2,)), trials)
    run = runner.run([SETUP], RunPlan(0, limit_s=25))[0].run
    assert run.failure == ""
    end = run.figures.to_target
    assert (end.reached, end.best, end.samples) == (False, 0.95, 6400)
    assert trials.options[-2:] == ["--env", "PACELINE_SEED_SHIFT=0"]
    run = runner.run([SETUP], RunPlan(100, limit_s=25))[0].run  # without a target it has failed
    assert run.failure == "it took longer than 25 s"
    assert "--until" not in trials.options
