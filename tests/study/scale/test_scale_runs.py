"""Studies of real scripts on this machine: batches, failures, interruption, templates."""

import os
import signal
import subprocess

import pytest
import ranks

from paceline.analyze.scaling.study_folder import read_study
from paceline.analyze.scaling.study_model import KNOB, STRONG, WEAK

pytestmark = pytest.mark.long

TRAIN = """
    import sys, time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    kind = sys.argv[1]
    batch = 8 if kind == "ignores" else int(sys.argv[2])
    if kind == "fails" and dist.get_world_size() > 1:
        raise RuntimeError("no memory for two")
    data = TensorDataset(torch.randn(4096, 8))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1000):
        torch.save(model.state_dict(), "model.pt")
        for i, (x,) in enumerate(loader):
            model(x).square().mean().backward()
            if kind != "accumulates" or i % 2:
                time.sleep(0.01)  # so that the throughput of three runs hardly differs
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()
    """
OPTIONS = ("--minutes", "8", "--steps", "20", "--precision", "100%")


def command(folder, *words):
    return [ranks.PACELINE, "scale", *words]


def run(folder, *words, check=0):
    done = ranks.run_command(command(folder, *words), folder, ranks.environment(), 560)
    assert done.returncode == check, done.stderr
    return done


def test_both_kinds_are_measured_with_the_batch_of_each_size(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    words = ("-n", "1,2", "--strong", "--weak", *OPTIONS, "-o", "study", script, "trains", "32")
    done = run(tmp_path, *words)
    study = read_study(tmp_path / "study")
    assert study.batch.how == KNOB
    found = {(p.kind, p.ranks): p for p in study.points}
    assert {at: p.setup.global_batch for at, p in found.items()} == {
        (STRONG, 1): 32,
        (STRONG, 2): 32,
        (WEAK, 1): 32,
        (WEAK, 2): 64,
    }
    for point in study.points:
        assert len(point.runs) >= 3
        for figures in point.figures:
            assert figures.usual_samples == point.setup.global_batch
            states = figures.seconds.__dict__.values()
            assert sum(states) == pytest.approx(figures.mean_step_s, rel=1e-6)
            assert len(figures.spread.busy_mean_s) == point.ranks
            assert figures.memory_bytes == [] or len(figures.memory_bytes) == point.ranks
            threads = {one.threads for one in figures.placement}
            assert threads == {max(len(os.sched_getaffinity(0)) // 2, 1)}
        assert any(load.calls > 0 and load.bytes > 0 for load in point.figures[0].collectives)
    assert "DataLoader" in done.stdout + done.stderr
    assert not (tmp_path / "model.pt").exists()  # what the script writes goes elsewhere
    assert not list((tmp_path / "study").rglob("scratch"))


def test_batch_is_divided_among_accumulated_batches(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    words = ("-n", "1,2", "--strong", *OPTIONS, "-o", "study", script, "accumulates", "32")
    run(tmp_path, *words)
    study = read_study(tmp_path / "study")
    assert [(p.setup.global_batch, p.failure) for p in study.points] == [(64, ""), (64, "")]
    assert {f.batches_per_step for p in study.points for f in p.figures} == {2}
    assert "64 samples a step at the smallest size, in 2 batches" in study.batch.text


def test_script_that_ignores_its_batch_is_named(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    words = ("-n", "1,2", "--strong", *OPTIONS, "-o", "study", "--global-batch", "32", script)
    done = run(tmp_path, *words, "ignores", "{per_rank}", check=2)
    assert "trains 8 samples a step on 1 rank instead of 32" in done.stderr
    assert "HINT: create the training DataLoader with this argument" in done.stderr


def test_failure_at_one_size_is_in_the_words_of_the_script(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    done = run(tmp_path, "-n", "1,2", "--strong", *OPTIONS, "-o", "study", script, "fails", "32")
    one, two = read_study(tmp_path / "study").points
    assert len(one.runs) >= 3
    assert two.failure == "RuntimeError: no memory for two"
    assert "no memory for two" in done.stdout


def test_study_that_is_killed_or_interrupted_is_continued(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    words = ("-n", "1,2", "--strong", *OPTIONS, "-o", "study", script, "trains", "32")
    for kind in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(
            command(tmp_path, *words),
            cwd=tmp_path,
            env=ranks.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "run 1:" in line:  # the first run has ended
                break
        process.send_signal(kind)
        rest = process.communicate(timeout=60)
        assert process.returncode == (-9 if kind == signal.SIGKILL else 130), "".join(lines)
        words = ("--continue", "study")
    assert "HINT: paceline scale --continue study" in rest[1]
    before = len(read_study(tmp_path / "study").runs)
    assert before >= 2
    run(tmp_path, "--continue", "study")
    study = read_study(tmp_path / "study")
    assert all(len(point.runs) >= 3 for point in study.points)
    folders = list((tmp_path / "study" / "runs").iterdir())
    assert all((path / "figures.json").exists() for path in folders)
