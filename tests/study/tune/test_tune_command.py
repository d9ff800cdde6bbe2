"""``paceline tune`` as its users run it: ranks, kills, foreign scripts, functions, Slurm."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import ranks
import torch

ROOT = Path(__file__).resolve().parents[3]

TRAIN = """
    import argparse, os, socket
    from pathlib import Path
    import torch
    import paceline

    parser = argparse.ArgumentParser()
    for name in ("--lr", "--checkpoint", "--folder"):
        parser.add_argument(name)
    args = parser.parse_args()
    world = paceline.init(progress=False, record=False)
    inputs = torch.arange(16.0).reshape(16, 1) / 16
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(inputs, 3 * inputs)
    loader = world.shard(torch.utils.data.DataLoader(data, batch_size=4), global_batch=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(args.lr))
    model, optimizer = world.distribute(model, optimizer)
    seen = Path(args.folder) / f"rank-{world.rank}"
    note = open(f"{seen}-note", "w")
    note.write("the destructor has written this")
    for epoch in world.epochs(3, checkpoint=args.checkpoint):
        total = world.meter()
        for x, y in world.batches(loader):
            loss = ((model(x) - y) ** 2).mean()
            world.backward(loss)
            world.step(optimizer)
            total.add(loss=loss * len(x), count=len(x))
        with seen.open("a") as file:
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            file.write(f"{epoch} {args.lr} {world.size} {socket.gethostname()} {cores}\\n")
        world.log(loss=total.ratio("loss", "count"))
"""
STUDY = """
[study]
command = "train.py --lr {lr} --checkpoint {checkpoint} --folder {folder}"
metric = "loss"
goal = "min"
search = "random"
trials = 3
ranks = 2
epochs = 3
pruner = "promotion"

[parameters.lr]
low = 0.001
high = 0.5
log = true
"""


def tune(folder, *options, check=True, timeout=240, **keys):
    done = subprocess.run(
        [ranks.PACELINE, "tune", "study.toml", *map(str, options)],
        cwd=folder,
        env=ranks.environment(**keys),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def losses_alone(lr, epochs):
    """Return the losses of TRAIN in one process, without Paceline."""
    inputs = torch.arange(16.0).reshape(16, 1) / 16
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    found = []
    for _ in range(epochs):
        total = 0.0
        for x in inputs.split(4):
            loss = ((model(x) - 3 * x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        found.append(total / len(inputs))
    return found


@pytest.mark.parametrize("sizes", [[2, 1], pytest.param([1, 2], marks=pytest.mark.long)])
def test_all_ranks_of_a_trial_have_its_parameters_and_pause_after_the_same_step(tmp_path, sizes):
    """Also where a promoted trial has another number of ranks: the losses are those of one
    process.
    """
    ranks.write(tmp_path, TRAIN, "train.py")
    (tmp_path / "study.toml").write_text(f"{STUDY}[pruner]\nranks = {sizes}\n")
    study = json.loads(tune(tmp_path, "--json").stdout)
    states = [one["state"] for one in study["trials"]]
    assert sorted(states) == ["complete", "stopped", "stopped"]
    for trial in study["trials"]:
        folder, lr = tmp_path / f"study.trials/{trial['number']:05}", trial["parameters"]["lr"]
        epochs = range(3 if trial["state"] == "complete" else 1)
        for rank in (0, 1):
            expected = [[str(e), repr(lr), str(n)] for e in epochs if rank < (n := sizes[e > 0])]
            lines = (folder / f"rank-{rank}").read_text().splitlines() if expected else []
            assert [line.split()[:3] for line in lines] == expected
            note = folder / f"rank-{rank}-note"
            assert not expected or note.read_text() == "the destructor has written this"
        losses = [value for _, value in trial["intermediate"]]
        assert losses == pytest.approx(losses_alone(lr, len(epochs)))
    assert not ranks.alive(str(tmp_path))


SLOW = """
    import argparse, time
    from pathlib import Path
    import paceline

    parser = argparse.ArgumentParser()
    parser.add_argument("--x", type=float)
    x = parser.parse_args().x
    for step in range(1, 5):
        while step > 1 and not Path(__file__).with_name("go-on").exists():
            time.sleep(0.05)  # until the runner has been ended
        paceline.tune.report(x * step, step)
"""
SLOW_STUDY = """
[study]
command = "slow_trial.py --x {x}"
metric = "score"
goal = "max"
search = "random"
trials = 6
[parameters.x]
low = 0.0
high = 1.0
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_runner_that_was_ended_is_continued(tmp_path, number):
    ranks.write(tmp_path, SLOW, "slow_trial.py")
    (tmp_path / "study.toml").write_text(SLOW_STUDY)
    process = ranks.start([ranks.PACELINE, "tune", "study.toml"], cwd=tmp_path)
    reports = tmp_path / "study.trials/00001/attempt-1.reports"
    ranks.wait_until(reports.exists, 120)
    refused = tune(tmp_path, "--continue", check=False)
    assert refused.returncode == 2
    assert f"process {process.pid} on" in refused.stderr
    os.kill(process.pid, number)
    assert process.wait(60) in (-9, 130)
    ranks.wait_until(lambda: not ranks.alive("slow_trial.py"), 10)
    (tmp_path / "go-on").touch()
    study = json.loads(tune(tmp_path, "--continue", "--json").stdout)
    assert [one["state"] for one in study["trials"]] == ["complete"] * 6
    ends = [json.loads(path.read_text())["code"] for path in tmp_path.glob("study.trials/*/*.end")]
    assert ends.count(0) == 6
    for one in study["trials"]:
        assert one["values"] == [pytest.approx(4 * one["parameters"]["x"])]


@pytest.mark.long
def test_a_function_is_a_trial(tmp_path):
    ranks.write(
        tmp_path,
        """
        def train(x, kind, seed):
            return {"loss": (x - 1) ** 2 + seed, "size": x if kind == "a" else 2 * x}
        """,
        "model.py",
    )
    (tmp_path / "study.toml").write_text(
        "[study]\nfunction = 'model.py:train'\nmetric = ['loss', 'size']\ngoal = 'min'\n"
        "trials = 6\nsearch = 'nsga2'\n[parameters.x]\nlow = 0.5\nhigh = 2.0\n"
        "[parameters.kind]\nchoices = ['a', 'b']\n"
    )
    study = json.loads(tune(tmp_path, "--json").stdout)
    assert [one["state"] for one in study["trials"]] == ["complete"] * 6
    for one in study["trials"]:
        x, kind = one["parameters"]["x"], one["parameters"]["kind"]
        assert one["values"] == [pytest.approx((x - 1) ** 2), x if kind == "a" else 2 * x]
    assert study["best"]


@pytest.mark.long
def test_the_output_of_a_foreign_script_has_the_metric(tmp_path):
    ranks.write(tmp_path, "import sys\nprint('epoch 3: accuracy', sys.argv[1])\n", "foreign.py")
    (tmp_path / "study.toml").write_text(
        "[study]\ncommand = 'foreign.py {x}'\nmetric = 'accuracy'\ngoal = 'max'\n"
        "trials = 2\nsearch = 'random'\n[patterns]\n"
        "accuracy = 'epoch (?P<step>\\d+): accuracy (?P<value>\\S+)'\n"
        "[parameters.x]\nlow = 0.0\nhigh = 1.0\n"
    )
    study = json.loads(tune(tmp_path, "--json", "--csv", "trials.csv").stdout)
    for one in study["trials"]:
        assert one["values"] == [pytest.approx(one["parameters"]["x"])]
        assert [step for step, _ in one["intermediate"]] == [3]
    lines = (tmp_path / "trials.csv").read_text().splitlines()
    assert lines[0].startswith("trial,state,x,accuracy,step")
    best = tune(tmp_path, "--best", "best.toml")
    assert "best parameters: best.toml" in best.stderr
    values = [one["parameters"]["x"] for one in study["trials"]]
    assert f"x = {max(values)!r}" in (tmp_path / "best.toml").read_text()


@pytest.mark.long
def test_trials_on_two_nodes_of_slurm(slurm, shared_folder):
    """Trials of 2 ranks, on two nodes of one core and on nodes of two cores, and a journal that two
    nodes write.

    A second runner on another node is refused while the first one runs. That one is killed, and the
    study is continued on the other node. Then two trials run side by side, each on a node.
    """
    waits = "while not Path('go').exists(): time.sleep(0.05)\nfor epoch in"
    script = "import time\n" + dedent(TRAIN).replace("for epoch in", waits, 1)
    ranks.write(shared_folder, script, "train.py")
    (shared_folder / "study.toml").write_text(
        STUDY.replace("trials = 3", "trials = 4").replace('pruner = "promotion"', "")
    )
    words = (ranks.PACELINE, "tune", "study.toml")
    process = slurm.start("salloc", "-N", "2", *words, cwd=shared_folder)
    trials = shared_folder / "study.trials"
    ranks.wait_until((trials / "00000/rank-1-note").exists, 200)
    runner = json.loads((trials / ".paceline-run.json").read_text())
    second = slurm.run(*words, "--continue", host="host1", cwd=shared_folder, check=False)
    assert second.returncode == 2
    assert f"process {runner['pid']} on host0" in second.stderr
    assert process.poll() is None
    slurm.hosts.run("host0", "kill", "-9", str(runner["pid"]))
    process.wait(60)
    assert runner["host"] == "host0"
    (shared_folder / "go").touch()
    two_cores = ("salloc", "-N", "2", "--ntasks-per-node", "2")
    words = (*two_cores, *words, "--continue", "--json")
    done = slurm.run(*words, host="host1", cwd=shared_folder, timeout=400)
    study = json.loads(done.stdout[done.stdout.index("{") :])
    assert [one["state"] for one in study["trials"]] == ["complete"] * 4
    nodes = set()
    for one in study["trials"]:
        files = [trials / f"{one['number']:05}/rank-{rank}" for rank in (0, 1)]
        lines = [line.split() for file in files for line in file.read_text().splitlines()]
        assert {line[1] for line in lines} == {repr(one["parameters"]["lr"])}
        assert {line[2] for line in lines} == {"2"}
        assert len({line[3] for line in lines}) == 1
        nodes.add(lines[0][3])
    assert len(nodes) == 2
    assert not slurm.left_over()


@pytest.mark.long
def test_the_digits_example_is_tuned(tmp_path):
    """In less than ten minutes on two cores, to a better accuracy than that of its defaults."""
    for name in ("digits.py", "digits.toml"):
        (tmp_path / name).write_text((ROOT / "examples" / name).read_text())
    (tmp_path / "digits.toml").rename(tmp_path / "study.toml")
    done = tune(tmp_path, "--json", timeout=900)
    study = json.loads(done.stdout)
    defaults = next(one for one in study["trials"] if one["known"])
    assert defaults["parameters"] == {"lr": 0.002, "batch": 64}
    (best,) = (study["trials"][number] for number in study["best"])
    assert best["values"][0] > 0.9973  # that of its defaults, after 30 epochs


def test_what_is_missing_is_told(tmp_path, monkeypatch):
    (tmp_path / "study.toml").write_text(SLOW_STUDY)
    done = tune(tmp_path, check=False)
    assert done.returncode == 2
    assert re.search(r"slow_trial\.py does not exist", done.stderr)
    (tmp_path / "optuna.py").write_text("raise ImportError\n")
    code = "import sys; sys.path.insert(0, '.'); from paceline.cli import main; main()"
    words = [sys.executable, "-c", code, "tune", "study.toml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "HINT: pip install 'paceline[tune]'" in done.stderr
