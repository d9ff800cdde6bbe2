"""The guard in the launcher, fed with the messages and lines that ranks send."""

import pytest
import records

from paceline.analyze.reference.metric import LOGGED, PATTERN, Metric
from paceline.analyze.reference.reference_file import read_reference, write_reference
from paceline.analyze.reference.series import Model, Reference
from paceline.launch.guard.guarded_job import GuardedJob
from paceline.launch.guard.loss_guard import LossGuard, MetricPattern, load_reference
from paceline.launch.guard.request import (
    DIVERGED_EXIT_CODE,
    Action,
    GuardRequest,
    parse_metric,
)

MODEL = Model([[4, 4]], 1, 16)


@pytest.fixture
def reference(tmp_path):
    file = tmp_path / "reference.json"
    known = records.loss_reference()
    write_reference(file, Reference(Metric(), known.runs, MODEL))
    return str(file)


def rows(values, first=1, bits=lambda step: 7):
    half = records.LOSS_BATCH // 2
    return [
        (step, half * step, half, float(value), 0.1, 1.0, bits(step))
        for step, value in enumerate(values, first)
    ]


def feed(guard, values, ranks=2, **options):
    """Send the steps of all ranks; return what the guard says, and its last answer."""
    said, result = [], ""
    for row in rows(values, **options):
        for rank in range(ranks):
            guard.take_message(rank, {"steps": [row]})
        result = guard.check(said.append) or result
    return "".join(said), result


def test_healthy_job_is_told_nothing_before_its_end(reference):
    guard = LossGuard(GuardRequest([reference]), 2, [])
    assert "3 reference runs of 500 values, up to 16,000 samples" in guard.start_text
    assert "at most 1 %" in guard.start_text
    said, result = feed(guard, records.healthy_losses(10))
    assert (said, result) == ("", "")
    last = []
    assert guard.finish(last.append) == ""
    assert "500 values of the loss, up to 16,000 samples, stayed within the band" in last[0]


@pytest.mark.parametrize(("first", "kept"), [(41, 40), (1, 0), (61, 60)])
def test_steps_that_an_attempt_repeats_are_saved_once(tmp_path, first, kept):
    """A job that restarts goes on from its last checkpoint, or from its start."""
    file = tmp_path / "losses.json"
    guard = LossGuard(GuardRequest([], save=str(file)), 2, [])
    values = records.healthy_losses(10)
    feed(guard, values[:60])
    guard.begin_attempt(2)
    feed(guard, values[first - 1 : 100] + 0.01, first=first)
    guard.finish(lambda text: None)
    run = read_reference(file).runs[0]
    assert run.steps.tolist() == list(range(1, 101))
    assert run.values[:kept] == pytest.approx(values[:kept])
    assert run.values[kept:] == pytest.approx(values[kept:100] + 0.01)
    assert len(run.rates) == 100


def test_lines_that_an_attempt_repeats_are_saved_once(tmp_path):
    file = tmp_path / "losses.json"
    metric = r"step (?P<step>\d+) loss (?P<value>\S+)"
    guard = LossGuard(GuardRequest([], metric=metric, save=str(file)), 1, [])
    for first, last in ((1, 6), (5, 10)):  # the second attempt goes on from a checkpoint of step 4
        guard.begin_attempt(1)
        for step in range(first, last + 1):
            guard.take_line(0, f"step {step} loss {step / first}")
    assert guard.result().runs[0].steps.tolist() == list(range(1, 11))


def test_divergence_is_told_once_with_its_step(reference):
    guard = LossGuard(GuardRequest([reference]), 2, [])
    values = records.healthy_losses(10)
    values[300:] += 1.0
    said, result = feed(guard, values)
    assert result == "diverged"
    assert said.count("guard:") == 1
    assert "the loss has left the band of the reference at step 301 (9,632 samples)" in said
    assert "above the" in said
    assert "What changed there is not known" in said


def test_ranks_that_differ_are_told(reference):
    guard = LossGuard(GuardRequest([reference]), 2, [])
    values = records.healthy_losses(10)
    for number, row in enumerate(rows(values)):
        for rank in range(2):
            bits = 7 if number < 200 or rank == 0 else 8
            guard.take_message(rank, {"steps": [(*row[:6], bits)]})
    said = []
    assert guard.check(said.append) == "diverged"
    assert "the parameters of rank 1 differ from those of the other ranks since step 201" in said[0]


def test_reference_of_another_model_is_a_mistake(reference):
    guard = LossGuard(GuardRequest([reference]), 1, [])
    other = {"shapes": [[4, 5]], "tensors": 1, "elements": 20, "sharded": False}
    guard.take_message(0, {"model": other})
    job, said = GuardedJob(guard), []
    end = job.check(said.append, False, lambda: None)
    assert (end.exit_code, end.may_restart, job.exit_code) == (2, False, 2)
    assert "another model: the reference's has 16 parameters" in end.text
    assert "shape [4, 4] there, [4, 5] here" in end.text
    job.finish(said.append)
    assert said == []


def test_sharded_models_are_not_compared(reference):
    guard = LossGuard(GuardRequest([reference]), 1, [])
    guard.take_message(
        0, {"model": {"shapes": [[2]], "tensors": 1, "elements": 2, "sharded": True}}
    )
    assert guard.check(lambda text: None) == ""


@pytest.mark.parametrize(
    ("action", "can_stop", "code", "ends", "warned"),
    [
        (Action.TELL, True, 0, False, 0),
        (Action.STOP, True, DIVERGED_EXIT_CODE, True, 0),
        (Action.CHECKPOINT, True, DIVERGED_EXIT_CODE, False, 1),
        (Action.CHECKPOINT, False, 0, False, 1),
    ],
)
def test_actions(reference, action, can_stop, code, ends, warned):
    guard = LossGuard(GuardRequest([reference], action=action), 1, [])
    values = records.healthy_losses(10)
    values[300:] += 1.0
    for row in rows(values):
        guard.take_message(0, {"steps": [(row[0], 2 * row[1], *row[2:])]})
    job, said, warnings = GuardedJob(guard), [], []
    assert bool(job.check(said.append, can_stop, lambda: warnings.append(1))) is ends
    assert (job.exit_code, len(warnings)) == (code, warned)


def test_lines_with_step_are_compared_at_its_samples(tmp_path):
    file = tmp_path / "reference.json"
    metric = Metric(PATTERN, r"step (?P<step>\d+),? loss[ =:]+(\S+)")
    write_reference(file, Reference(metric, records.loss_reference().runs, MODEL))
    values = records.healthy_losses(10)
    values[300:] += 1.0
    guard = LossGuard(GuardRequest([str(file)]), 1, [])
    said = []
    for row, value in zip(rows(values), values, strict=True):
        guard.take_message(0, {"steps": [(row[0], 2 * row[1], 2 * row[2], *row[3:])]})
        guard.take_line(0, f"step {row[0]}, loss: {value:.4f}")
        guard.check(said.append)
    assert "has left the band of the reference at step 301 (9,632 samples)" in "".join(said)


def test_pattern_that_matches_nothing_is_told_once(tmp_path, reference):
    write_reference(
        tmp_path / "r", Reference(Metric(PATTERN, r"x=(\d)"), records.loss_reference().runs)
    )
    guard = LossGuard(GuardRequest([str(tmp_path / "r")]), 1, [])
    said = []
    for number in range(1000):
        guard.take_line(0, f"step {number} loss 1.0")
        guard.check(said.append)
    assert len(said) == 1
    assert "matches none of 200 lines of output" in said[0]
    assert "'step 199 loss 1.0'" in said[0]


def test_values_of_world_log(tmp_path):
    file = tmp_path / "reference.json"
    write_reference(file, Reference(Metric(LOGGED, "loss"), records.loss_reference().runs, MODEL))
    values = records.healthy_losses(10)
    values[300:] += 1.0
    guard = LossGuard(GuardRequest([str(file)]), 2, [])
    said = []
    for step, value in enumerate(values, 1):
        logged = {"loss": float(value), "accuracy": 0.5}
        guard.take_message(
            0, {"logged": logged, "step": step, "seen": step * records.LOSS_BATCH // 2}
        )
        guard.check(said.append)
    assert "the metric 'loss' has left the band of the reference at step 301" in "".join(said)


def test_samples_that_are_not_known_are_told_and_steps_compared(reference):
    guard = LossGuard(GuardRequest([reference]), 1, [])
    values = records.healthy_losses(10)
    values[300:] += 1.0
    said = []
    for row in rows(values):
        guard.take_message(0, {"steps": [(row[0], 0, 0, *row[3:])]})
        guard.check(said.append)
    assert "compared with the reference at equal steps" in said[0]
    assert "left the band of the reference at step 301:" in said[1]


def test_another_global_batch_is_told(reference):
    guard = LossGuard(GuardRequest([reference]), 4, [])
    said, _ = feed(guard, records.healthy_losses(10)[:50], ranks=4)
    assert "a step has 64 samples, in the reference 32" in said


def test_values_are_saved_as_a_reference(tmp_path):
    file = tmp_path / "saved.json"
    guard = LossGuard(GuardRequest([], "backward", save=str(file)), 2, ["train.py"])
    values = records.healthy_losses(10)
    feed(guard, values)
    guard.finish(lambda text: None)
    found = read_reference(file)
    assert found.command == ["train.py"]
    assert found.runs[0].samples_per_step == records.LOSS_BATCH
    assert found.runs[0].rates[3] == 0.1
    assert abs(found.runs[0].values[100] - values[100]) < 1e-6


def test_outputs_of_runs_are_references(tmp_path):
    file = tmp_path / "out.txt"
    lines = [f"[0] step={i} loss={v:.5f}\n" for i, v in enumerate(records.healthy_losses(0), 1)]
    file.write_text("start\n" + "".join(lines))
    found = load_reference([str(file)], r"step=(?P<step>\d+) loss=(\S+)")
    assert len(found.runs[0]) == 500
    assert found.axis == "steps"
    with pytest.raises(ValueError, match=r"matches none of the 502 lines"):
        load_reference([str(file)], r"accuracy=(\S+)")
    with pytest.raises(ValueError, match=r"neither a reference nor a record"):
        load_reference([str(file)], None)


def test_reference_of_another_metric_is_refused(reference):
    with pytest.raises(ValueError, match=r"is of another metric: it has the loss of each"):
        load_reference([reference], r"loss (\S+)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss (", "is no regular expression"),
        ("loss .*", "needs one group"),
        (r"(\d+) loss (\S+)", "has 2 groups for the value"),
        (r"(?P<epoch>\d+) (\S+)", "may have groups named step"),
    ],
)
def test_patterns_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_metric(text)


def test_numbers_in_lines():
    pattern = MetricPattern(r"loss[ =:]+(\S+)")
    assert pattern.find("epoch 1  \x1b[1mloss\x1b[0m: 1,234.5,").value == 1234.5
    assert str(pattern.find("loss=nan").value) == "nan"
    assert pattern.find("loss=unknown") is None
    named = MetricPattern(r"(?P<samples>\d+) (?P<value>\S+) (?P<step>\d+)")
    found = named.find("640 0.5 10")
    assert (found.samples, found.value, found.step) == (640.0, 0.5, 10.0)
