"""Consecutive faults at random moments in a job that restarts after each.

Each fault has to be named correctly, and the final parameters equal those of an undisturbed run.
"""

import json
import os
import random
import re
import subprocess

import pytest
import ranks
import torch

pytestmark = pytest.mark.soak
SEED = int(os.environ["PACELINE_SEED"])
# Each fault takes 2 s. With those in test_host_soak and the kills in test_soak, there are 100.
FAULTS = int(os.environ.get("PACELINE_SOAK_FAULTS", 50))
HERE, OVER_HOSTS = FAULTS * 36 // 100, FAULTS * 24 // 100
RANKS = 3

# plan.json has, for each attempt: the fault, its rank, and the number of steps before it.
TRAIN = """
    import json, os, signal, sys, time
    from pathlib import Path
    import torch
    import paceline

    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    plan = json.loads(Path("plan.json").read_text())
    fault, victim, after = plan[attempt] if attempt < len(plan) else ("none", -1, 0)
    torch.manual_seed(0)
    world = paceline.init(seed=1)
    data = [(torch.randn(16), torch.randn(4)) for _ in range(64)]
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    model, optimizer = world.distribute(model, torch.optim.Adam(model.parameters()))
    loader = world.shard(torch.utils.data.DataLoader(data, shuffle=True, batch_size=4))

    def now(done):
        if rank != victim or done != after:
            return
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "raised":
            raise RuntimeError(f"planted in attempt {attempt}")
        if fault == "exit":
            os._exit(7)
        if fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "sleeps":
            time.sleep(1000)
        if fault == "brief":
            if os.fork() == 0:
                time.sleep(0.7)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)

    done = 0
    for epoch in world.epochs(EPOCHS, checkpoint="run", every="2steps"):
        for x, y in world.batches(loader):
            now(done)
            world.backward(torch.nn.functional.mse_loss(model(x), y))
            world.step(optimizer)
            done += 1
    if rank == 0:
        torch.save(model.state_dict(), sys.argv[1])
    """
KINDS = ("killed", "segfault", "raised", "exit", "stopped", "sleeps")
SAID = {
    "killed": "rank {rank}{on} was killed by SIGKILL (signal 9)",
    "segfault": "rank {rank}{on} was killed by SIGSEGV (signal 11)",
    "raised": "rank {rank}{on} failed: RuntimeError: planted in attempt {attempt}",
    "exit": "rank {rank}{on} ended with exit code 7",
    "stopped": "Rank {rank}{on} has not entered it: its process is stopped by a signal (SIGSTOP)",
    "sleeps": "Rank {rank}{on} has not entered it: it last ended",
}


def planned(faults):
    """Return equal numbers of each kind of fault in random order, on random ranks and steps."""
    print(f"PACELINE_SEED={SEED}")
    chance = random.Random(SEED)
    kinds = [KINDS[i % len(KINDS)] for i in range(faults)]
    chance.shuffle(kinds)
    return [(kind, chance.randrange(RANKS), chance.randrange(3, 9)) for kind in kinds]


def options(faults):
    return ["--max-restarts", str(faults), "--hang-timeout", "1.5"]


def check(plan, said, folders, hosts=None):
    """Assert that each attempt's fault was named and the parameters are as without faults."""
    attempts = re.split(r"paceline: the job restarts from the last checkpoint.*\n", said)
    assert len(attempts) == len(plan) + 1
    for number, (kind, rank, _) in enumerate(plan):
        text = " ".join(attempts[number].split())
        on = f" on {hosts[rank]}" if hosts else ""
        assert SAID[kind].format(rank=rank, on=on, attempt=number) in text, (number, kind, text)
    expected, found = (torch.load(folder / "model.pt") for folder in folders)
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_consecutive_faults_are_reported_and_lose_only_steps(tmp_path):
    plan = planned(HERE)
    # Enough epochs that the training does not end before the last fault.
    script = ranks.write(tmp_path, TRAIN.replace("EPOCHS", str(2 * HERE)))
    folders = [tmp_path / name for name in ("undisturbed", "disturbed")]
    for folder, faults in zip(folders, ([], plan), strict=True):
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(faults))
        launcher = f"paceline {' '.join(options(HERE))}"
        command = ranks.command(script, "model.pt", ranks=RANKS, launcher=launcher)
        result = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            env=ranks.environment(NO_COLOR="1"),
        )
        assert result.returncode == 0, result.stderr[-3000:]
    check(plan, result.stderr, folders)
    assert ranks.alive(str(script)) == []


def test_consecutive_faults_on_two_hosts(hosts, shared_folder):
    plan = planned(OVER_HOSTS)
    script = ranks.write(shared_folder, TRAIN.replace("EPOCHS", str(2 * OVER_HOSTS)))
    folders = [shared_folder / name for name in ("undisturbed", "disturbed")]
    for folder, faults in zip(folders, ([], plan), strict=True):
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(faults))
        words = [*options(OVER_HOSTS), "-H", "host1:2,host2:1", str(script), "model.pt"]
        process = hosts.start("host0", ranks.PACELINE, "run", *words, cwd=folder)
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said[-3000:]
    check(plan, said, folders, ["host1", "host1", "host2"])
    assert hosts.left_over(10) == []
