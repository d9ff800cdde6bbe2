"""paceline diagnose ends in the time that it was given, with what it has found by then."""

import json
import signal
import subprocess

import pytest
import ranks

from paceline.study.diagnose.plan import (
    LEAST_STEPS,
    Plan,
    RoundCost,
    first_plan,
    fit_into_script,
    next_plan,
)
from paceline.study.script_runs.run_process import Deadline

ROUNDS = (3, 9)
TRAIN = """
    import sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(sys.argv[2])):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        time.sleep(float(sys.argv[1]))
    """


@pytest.mark.parametrize("left_s", [5.0, 20.0, 60.0, 300.0])
@pytest.mark.parametrize("step_s", [0.005, 0.1, 0.6])
def test_planned_rounds_fit_into_the_time(left_s, step_s):
    cost = RoundCost(start_s=1.0, step_s=step_s, phases=5)
    plan = first_plan(left_s, cost, 5, 0, ROUNDS)
    round_s = cost.duration_s(plan.warm + plan.steps)
    if round_s <= left_s:
        many = left_s >= ROUNDS[0] * cost.duration_s(LEAST_STEPS + 5)
        assert left_s / round_s >= (ROUNDS[0] if many else 1)
        assert plan.steps >= LEAST_STEPS or not many
    else:  # not even the shortest round fits
        assert plan == Plan(1, 3)


def test_rounds_become_shorter_and_then_fewer():
    cost = RoundCost(start_s=2.0, step_s=0.1, phases=5)
    plan = Plan(5, 10)
    assert next_plan(plan, 10.0, 31.0, cost, 3, 0) == plan
    shorter = next_plan(plan, 10.0, 20.0, cost, 2, 0)
    assert shorter == plan
    shorter = next_plan(plan, 10.0, 12.0, cost, 2, 0)
    assert shorter.steps < plan.steps
    assert next_plan(plan, 10.0, 1.0, cost, 2, 0) is None
    assert next_plan(plan, 10.0, 9.0, cost, 0, 0) is None


def test_phases_fit_into_a_script_that_ends():
    assert fit_into_script(Plan(5, 20), 56, 4) == Plan(5, 9)
    assert fit_into_script(Plan(5, 20), 12, 4) is None  # each phase then gets a run of its own
    assert fit_into_script(Plan(5, 20), 12, 1) == Plan(5, 7)
    assert fit_into_script(Plan(1, 3), 12, 1) is None  # it fits already


def test_part_of_a_deadline_is_earlier():
    whole = Deadline.after(100)
    assert whole.part(0.5).at_s < whole.at_s
    assert Deadline.after(-1).left_s == 0


def diagnose(folder, *words):
    command = [ranks.PACELINE, "diagnose", "-n", "2", "--threads", "1", "--json"]
    return [*command, *words, str(ranks.write(folder, TRAIN))]


def environment(folder):
    (folder / "tmp").mkdir()
    return ranks.environment() | {"TMPDIR": str(folder / "tmp")}


def scratch_folders(folder):
    return list((folder / "tmp").glob("paceline-*"))


@pytest.mark.long
def test_steps_too_long_for_the_time_leave_the_record(tmp_path):
    done = subprocess.run(
        [*diagnose(tmp_path, "--minutes", "0.25"), "1.5", "1000"],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ended"] == "out-of-time"
    assert found["waterfall"] is None
    assert found["report"]["steps"] >= 2
    assert "--minutes 0.25 was enough for 0 rounds of experiments" in found["notes"][0]
    assert scratch_folders(tmp_path) == []


@pytest.mark.long
def test_terminated_diagnosis_prints_what_it_has(tmp_path):
    process = subprocess.Popen(
        [*diagnose(tmp_path, "--minutes", "1"), "0.1", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
    )
    for line in process.stderr:
        if "run 2" in line:  # the first run is over
            break
    assert "left)" in line
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    found = json.loads(out)
    assert found["ended"] == "interrupted"
    assert found["report"]["steps"] >= 10
    assert scratch_folders(tmp_path) == []
    still = subprocess.run(["pgrep", "-fa", str(tmp_path / "script.py")], capture_output=True)
    assert still.stdout == b""


@pytest.mark.long
def test_script_of_few_steps_gets_a_run_for_each_phase(tmp_path):
    done = subprocess.run(
        [*diagnose(tmp_path, "--minutes", "1"), "0.02", "12"],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["waterfall"] is not None
    assert found["notes"][0].startswith("the script ends after 12 steps: each experiment measures")
    assert found["rungs"]["silent"][0]["silent"] == 1


FAILS = """
    import os, sys
    if os.path.exists(os.environ["FAILS"]):
        sys.exit("no free port")
    """


@pytest.mark.long
def test_round_with_a_run_that_fails_once_is_repeated(tmp_path):
    marker, known = tmp_path / "fails", environment(tmp_path)
    path = ranks.write(tmp_path, FAILS.rstrip() + TRAIN)
    words = ["diagnose", "-n", "2", "--threads", "1", "--minutes", "0.75", "--json", str(path)]
    process = subprocess.Popen(
        [ranks.PACELINE, *words, "0.01", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=known | {"FAILS": str(marker)},
    )
    for line in process.stderr:
        if "run 3" in line:  # the first round
            marker.touch()
        if "run 4" in line:
            marker.unlink()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    found = json.loads(out)
    assert any(one.startswith("a run failed, and was repeated: ") for one in found["notes"])
    assert found["waterfall"] is not None
