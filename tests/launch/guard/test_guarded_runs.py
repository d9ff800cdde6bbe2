"""``paceline run --reference`` and ``--make-reference`` of real trainings."""

import json
import re

import pytest
import ranks

from paceline.analyze.reference.reference_file import read_reference
from paceline.launch.guard.request import DIVERGED_EXIT_CODE

TRAIN = """
    import sys
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    seed, fault = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    inputs = torch.randn(3200, 16, generator=torch.Generator().manual_seed(5))
    targets = inputs @ torch.randn(16, 4, generator=torch.Generator().manual_seed(6))
    targets = targets + 0.5 * torch.randn(3200, 4, generator=torch.Generator().manual_seed(7))
    torch.manual_seed(seed)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = TensorDataset(inputs, targets)
    sampler = DistributedSampler(data, seed=seed)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 32 // size, sampler=sampler):
            step += 1
            if fault and step >= fault:
                y = y[torch.randperm(len(y))]
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
"""
WORLD = """
    import sys
    import torch, paceline
    from torch.utils.data import DataLoader, TensorDataset
    fault, checkpoint = int(sys.argv[1]), sys.argv[2]
    world = paceline.init(progress=False)
    inputs = torch.randn(3200, 16, generator=torch.Generator().manual_seed(5))
    targets = inputs @ torch.randn(16, 4, generator=torch.Generator().manual_seed(6))
    targets = targets + 0.5 * torch.randn(3200, 4, generator=torch.Generator().manual_seed(7))
    model = torch.nn.Linear(16, 4)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.02))
    loader = world.shard(
        DataLoader(TensorDataset(inputs, targets), 32, shuffle=True), global_batch=32
    )
    step = 0
    # with a fault: longer than the guard takes to end the job
    for epoch in world.epochs(60 if fault else 2, checkpoint=checkpoint or None):
        for x, y in world.batches(loader):
            step += 1
            if fault and step >= fault:
                y = y[torch.randperm(len(y))]
            loss = torch.nn.functional.mse_loss(model(x), y)
            world.backward(loss)
            world.step(optimizer)
            world.log(train=loss)
"""


def make(folder, text, *args, seeds=2, options=""):
    """Make a reference; return the script, the file and what was printed."""
    script, file = ranks.write(folder, text), folder / "reference.json"
    launcher = f"paceline --make-reference {file} --seeds {seeds} {options}"
    words = ranks.command(script, *args, launcher=launcher)
    words[words.index("-n") : words.index("-n") + 2] = []
    result = ranks.run_command(words, folder, ranks.environment(), 300)
    assert result.returncode == 0, result.stderr
    return script, file, result.stderr


def test_fault_is_told_and_stops_the_job(tmp_path):
    script, file, _ = make(tmp_path, TRAIN, "{seed}", 0)
    reference = read_reference(file)
    assert [len(run) for run in reference.runs] == [200, 200]
    assert reference.runs[0].samples_per_step == 32
    assert reference.model.elements == 68
    launcher = f"paceline --reference {file} --on-divergence stop --json {tmp_path}/out.json"
    result = ranks.run(script, 7, 120, launcher=launcher, check=False)
    assert result.returncode == DIVERGED_EXIT_CODE
    found = re.search(r"left the band of the reference at step (\d+) \(([\d,]+)", result.stderr)
    assert 115 <= int(found[1]) <= 130
    assert int(found[2].replace(",", "")) == 32 * int(found[1])
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["format"], written["command"]) == ("paceline-guard", [str(script), "7", "120"])
    guard = written["guard"]
    assert (guard["result"], guard["on_divergence"]) == ("left-band", "stop")
    assert (guard["reference_runs"], guard["reference_end"]) == (2, 6400)
    left = guard["left"]
    assert (left["kind"], left["step"], left["samples"]) == (
        "high",
        int(found[1]),
        32 * left["step"],
    )
    assert left["value"] > left["expected"]
    assert left["step"] < left["found_step"] <= guard["values"]


@pytest.mark.long
def test_healthy_job_and_wrong_model(tmp_path):
    script, file, _ = make(tmp_path, TRAIN, "{seed}", 0)
    launcher = f"paceline --reference {file} --record {tmp_path}/record --json {tmp_path}/out.json"
    result = ranks.run(script, 8, 0, launcher=launcher)
    assert "stayed within the band of the reference" in result.stderr
    assert result.stderr.count("guard:") == 2
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["format"], written["steps"]) == ("paceline-report", 200)
    assert (written["guard"]["result"], written["guard"]["left"]) == ("within-band", None)
    assert (written["guard"]["values"], written["guard"]["end"]) == (200, 6400)
    other = ranks.write(tmp_path, TRAIN.replace("Linear(16, 4)", "Linear(16, 4, False)"), "b.py")
    launcher = f"paceline --reference {file} --json {tmp_path}/other.json"
    result = ranks.run(other, 8, 0, launcher=launcher, check=False)
    assert result.returncode == 2
    assert "the reference is of another model" in result.stderr
    assert json.loads((tmp_path / "other.json").read_text())["guard"]["result"] == "other-model"


@pytest.mark.long
def test_world_script_writes_a_checkpoint(tmp_path):
    script, file, said = make(tmp_path, WORLD, 0, "")
    assert "runs differ" not in said
    folder = tmp_path / "checkpoints"
    launcher = f"paceline --reference {file} --on-divergence checkpoint --max-restarts 2"
    result = ranks.run(script, 120, folder, launcher=launcher, check=False)
    assert result.returncode == DIVERGED_EXIT_CODE, result.stderr
    assert "was written after the divergence" in result.stderr
    assert any(folder.iterdir())
    assert "the job restarts" not in result.stderr


@pytest.mark.long
def test_values_of_world_log_and_records(tmp_path):
    script = ranks.write(tmp_path, WORLD)
    records = [tmp_path / "a", tmp_path / "b"]
    for record in records:
        ranks.run(script, 0, "", ranks=1, launcher=f"paceline --record {record} --metric train")
    reference = read_reference(records[0])
    assert str(reference.metric) == "'train' of world.log"
    assert len(reference.runs[0]) == 200
    options = " ".join(f"--reference {record}" for record in records)
    result = ranks.run(script, 0, "", launcher=f"paceline {options} --json {tmp_path}/out.json")
    assert "repeat another one value by value" in result.stderr
    assert "stayed within the band" in result.stderr
    written = json.loads((tmp_path / "out.json").read_text())  # of rank 0, and of the launcher
    assert (written["format"], written["steps"]) == ("paceline-report", 200)
    assert written["guard"]["metric"] == "'train' of world.log"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--reference absent.json", "--reference absent.json does not exist"),
        ("--on-divergence stop", "--on-divergence stop needs a reference"),
        ("--make-reference r.json", "-n 2: a reference is trained on one rank"),
        ("--seeds 3", "--seeds is for --make-reference"),
        ("--metric loss(", "is no regular expression"),
    ],
)
def test_mistakes_are_told_before_a_rank_starts(tmp_path, options, message):
    script = ranks.write(tmp_path, "print('started')")
    result = ranks.run(script, launcher=f"paceline {options}", check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert "HINT" in result.stderr
    assert "started" not in result.stdout


UNTIL = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    done = 0
    while True:  # only the launcher ends it
        for (x,) in DataLoader(TensorDataset(torch.ones(32, 4)), 8):
            model(x).mean().backward()
            optimizer.step()
        done += 1
        if dist.get_rank() == 0:
            print(f"accuracy {min(0.1 * done, 0.9):.2f}", flush=True)
"""


def test_job_ends_when_its_goal_is_reached(tmp_path):
    script, record = ranks.write(tmp_path, UNTIL), tmp_path / "record"
    launcher = rf"paceline --record {record} --metric accuracy\s+(\S+) --until accuracy>=0.85"
    result = ranks.run(script, launcher=launcher)  # exit code 0
    assert "accuracy>=0.85 is reached at step" in result.stderr
    (run,) = read_reference(record).runs
    first = next(i for i, value in enumerate(run.values) if value >= 0.85)
    assert run.values[first] == 0.9
    assert run.samples[first] == pytest.approx(9 * 32 * 2, rel=0.3)  # steps arrive beside lines
    assert run.peak_rate == 0.25


def test_goal_that_is_not_reached_is_reported_with_the_best_value(tmp_path):
    launcher = "paceline --until train<=-1"
    result = ranks.run(ranks.write(tmp_path, WORLD), 0, "", launcher=launcher)
    assert "train<=-1 was not reached: the best value is 0." in result.stderr


@pytest.mark.long
def test_world_script_writes_a_checkpoint_when_the_goal_is_reached(tmp_path):
    launcher = "paceline --until train<=0.6"
    words = (ranks.write(tmp_path, WORLD), 100000, tmp_path / "checkpoint")
    result = ranks.run(*words, launcher=launcher)
    assert "The ranks write a checkpoint and stop" in result.stderr
    assert any((tmp_path / "checkpoint").iterdir())
