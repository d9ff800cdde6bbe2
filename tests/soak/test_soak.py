"""Tests that repeat faults for a long time: `make soak`."""

import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ranks
import torch
from scripts import TRAIN

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run

pytestmark = pytest.mark.soak
SEED = int(os.environ["PACELINE_SEED"])

RESTART = """
    import os, time, torch, torch.distributed as dist
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if rank == attempt % 3:
        time.sleep(0.5 * (attempt % 2))  # one rank starts later, as on a busy machine
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 3
    if attempt < 20 and rank == attempt % 3:
        os._exit(1)
    dist.barrier()
    print("attempt", attempt, "done")
    """


def test_twenty_consecutive_restarts(tmp_path):
    result = ranks.run(
        ranks.write(tmp_path, RESTART),
        ranks=3,
        launcher="paceline --max-restarts 20",
        timeout=300,
    )
    assert ranks.untagged(result.stdout) == {"attempt 20 done"}
    assert result.stderr.count("the job restarts from the last checkpoint") == 20
    assert "connectFullMesh" not in result.stderr


LEAVE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    dist.all_reduce(torch.ones(1000000), async_op=True)
    dist.all_reduce(torch.ones(1000000), async_op=True).wait()
    """


@pytest.mark.parametrize("fresh", ["", " --fresh"])
def test_script_that_exits_right_after_all_reduce_ends_cleanly(tmp_path, fresh):
    script = ranks.write(tmp_path, LEAVE)
    for _ in range(4 if fresh else 8):
        result = ranks.run(script, launcher=f"paceline{fresh}", timeout=60)
        assert result.stderr == ""


def victims(script: Path, launcher: int) -> dict[str, int]:
    """Return the PIDs of the launcher, the rank server and the ranks."""
    found = {"launcher": launcher}
    for entry in Path("/proc").iterdir():
        try:
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            line = (entry / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if str(script).encode() in line and parent == launcher:
            found["server"] = int(entry.name)
        elif str(script).encode() in line and b"PACELINE_STATUS" not in environ:
            found[f"rank of {parent}: {entry.name}"] = int(entry.name)
    return found


def kill_at_random(folder, draw, whole, args, number):
    """Run trainings with ``number`` kills of the launcher, the rank server or a rank.

    Each training is started again until it finishes. Return the number of kills of each kind and
    of trainings.
    """
    folder.mkdir()
    script = ranks.write(folder, TRAIN)
    kills = {"launcher": 0, "server": 0, "rank": 0}
    trainings = 0
    while sum(kills.values()) < number:
        trainings += 1
        out, at = folder / f"out-{trainings}.pt", folder / f"ckpt-{trainings}"
        every = draw.choice(["3", "0.3s", "epoch"])
        start = ranks.command(script, out, *args, "--checkpoint", at, "--every", every)
        for _ in range(60):
            job = subprocess.Popen(start, env=ranks.environment(), stderr=subprocess.PIPE)
            deadline = time.monotonic() + draw.uniform(0.6, 2.2)
            while job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if job.poll() is None and sum(kills.values()) < number:
                name, pid = draw.choice(list(victims(script, job.pid).items()))
                try:
                    os.kill(pid, signal.SIGKILL)
                    kills[name.split()[0]] += 1
                except ProcessLookupError:
                    pass
            _, said = job.communicate(timeout=120)
            assert b"is skipped" not in said, said  # no checkpoint is ever incomplete
            ranks.wait_until(lambda: ranks.alive(str(script)) == [], seconds=5)
            if job.returncode == 0:
                break
        result = torch.load(out)
        for name, tensor in whole["model"].items():
            assert torch.equal(tensor, result["model"][name]), f"{name}, seed {SEED}"
        if result["figures"]:  # empty if killed between the last checkpoint and the end
            assert result["figures"][-1] == whole["figures"][-1]
    return {**kills, "trainings": trainings}


def test_resume_after_kills_at_random_times_is_bitwise_equal(tmp_path):
    """A run that is killed at any time and started again has bitwise the same result.

    Two trainings run at a time, because each mostly waits.
    """
    print(f"PACELINE_SEED={SEED}")
    script = ranks.write(tmp_path, TRAIN)
    args = ["--samples", 400, "--epochs", 3, "--dropout", 0.2, "--sleep", 0.02]
    ranks.run(script, tmp_path / "whole.pt", *args, ranks=2)
    whole = torch.load(tmp_path / "whole.pt")
    with ThreadPoolExecutor(2) as both:
        turns = [
            both.submit(kill_at_random, tmp_path / name, random.Random(SEED + at), whole, args, 25)
            for at, name in enumerate("ab")
        ]
        for turn in turns:
            print(turn.result())
    assert ranks.in_memory(tmp_path) == set()


RECORDED = """
    import sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10**6):
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        if step == 10 and dist.get_rank() == 0:
            print("trains", flush=True)
    """


def test_records_are_complete_after_kills_at_random_times(tmp_path):
    """Kill a rank, the rank server or the launcher: the records of both ranks are complete."""
    draw = random.Random(SEED)
    print(f"PACELINE_SEED={SEED}")
    script = ranks.write(tmp_path, RECORDED)
    for turn in range(6):
        record = tmp_path / f"record-{turn}"
        command = ranks.command(script, launcher=f"paceline --record {record}")
        running = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ranks.environment(),
            start_new_session=True,
        )
        try:
            assert b"trains" in running.stdout.readline()
            time.sleep(draw.uniform(0, 1))
            victim = draw.choice([running.pid, *ranks.family(running.pid)[1:]])
            os.kill(victim, signal.SIGKILL)
            running.wait(timeout=60)
        finally:
            running.kill()
        ranks.wait_until(lambda: not ranks.alive(str(script)))
        ranks.wait_until(lambda at=record: len(list(at.glob("*.ring"))) == 2)
        report = analyse(load_run(record))
        assert report.steps >= 10
        assert not report.refused
        assert all(sum(rank.values()) == pytest.approx(1) for rank in report.states)
    ranks.wait_until(lambda: not ranks.in_memory(tmp_path))
