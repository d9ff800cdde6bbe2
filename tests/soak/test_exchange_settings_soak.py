"""One command that packs, stages, trains and validates under Slurm, killed at random moments.

The job resumes after each kill, and its final model equals that of an undisturbed run.
"""

import os
import random
import signal
import subprocess
import time

import pytest
import ranks
import sets
import torch

from paceline.data import pack

pytestmark = pytest.mark.soak
SEED = int(os.environ["PACELINE_SEED"])
KILLS = 4
NEAR = "/tmp/near"  # separate on each host

# float64 and tolerances, because one rank and four ranks sum in different orders.
TRAIN = """
    import sys, time, torch
    import paceline
    from paceline.data import Loader

    torch.set_default_dtype(torch.float64)
    world = paceline.init(seed=1, progress=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 3))
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = world.shard(Loader("packed/train", 3, shuffle=True), global_batch=12)
    validation = world.shard(Loader("packed/test", 10), every_sample_once=True)
    for epoch in world.epochs(3, checkpoint="run", every="3steps"):
        for images, labels in world.batches(loader):
            world.backward(torch.nn.functional.cross_entropy(model(images.double() / 255), labels))
            world.step(optimizer)
            time.sleep(0.05)
        right = total = 0
        with torch.no_grad():
            for images, labels in world.batches(validation):
                right += (model(images.double() / 255).argmax(1) == labels).sum().item()
                total += len(labels)
        world.log(accuracy=world.mean(right, total))
    accuracy = world.mean(right, total)
    if world.rank == 0:
        plain = model.module if hasattr(model, "module") else model
        torch.save(plain.state_dict() | {"accuracy": torch.tensor(accuracy)}, "model.pt")
    """


def one_command(*options):
    """Return the command; it packs slowly, so that kills can happen during packing."""
    ways = []
    for part in ("train", "test"):
        pack = f"'files/{part} --apply slow:cut --shard-size 8k'"
        ways += ["--stage", f"packed/{part}", "--pack", pack]
    return " ".join(map(str, [ranks.PACELINE, "run", *options, *ways, "script.py"]))


def test_slurm_job_killed_at_random_times_resumes(
    hosts, slurm, shared_folder, tmp_path, monkeypatch
):
    print(f"PACELINE_SEED={SEED}")
    draw = random.Random(SEED)
    for part, count in (("train", 180), ("test", 30)):
        sets.images(shared_folder / "files" / part, count=count, seed=count)
    (shared_folder / "slow.py").write_text(
        "import time\n\ndef cut(image):\n    time.sleep(0.02)\n    return image[:16, :16]\n"
    )
    ranks.write(shared_folder, TRAIN)
    text = f"#!/bin/sh\nexport PACELINE_STAGE={NEAR} PYTHONPATH=.\n{one_command('-n', 4)}\n"
    ended, kills = [], []
    for turn in range(4 * KILLS):
        job = slurm.batch(text, "-N2", "--exclusive", cwd=shared_folder)
        slurm.wait_while(job, ("PENDING",))
        for _ in range(2 if len(kills) < KILLS else 0):
            time.sleep(draw.uniform(0.5, 7))
            kills += killed(hosts, draw)
        ended.append(slurm.wait(job, 120))
        said = (shared_folder / f"slurm-{job}.out").read_text()
        if ended[-1] == "COMPLETED":
            break
        assert kills, (turn, said)
    assert ended[-1] == "COMPLETED", (SEED, kills, said)
    print(f"{kills}: {ended}")
    monkeypatch.chdir(tmp_path)
    same_as_alone(shared_folder, tmp_path)
    for part in ("train", "test"):
        check = [ranks.PACELINE, "pack", "--check", shared_folder / "packed" / part]
        assert subprocess.run(check, capture_output=True).returncode == 0
        staged_right(hosts, shared_folder / "packed" / part)
    ranks.wait_until(lambda: [line for line in hosts.left_over(0) if NEAR not in line] == [], 20)


def killed(hosts, draw):
    """Kill a random process of the job on a random host; return its description in a list.

    The list is empty if that host has no process of the job.
    """
    host = draw.choice(["host1", "host2"])
    ours = "paceline (run|pack|stage)|paceline.launch|paceline.study|script.py"
    listed = hosts.run(host, "pgrep", "-af", ours, check=False).stdout.splitlines()
    mine = [line.split(" ", 1) for line in listed if "slurm" not in line]
    if not mine:
        return []
    pid, line = draw.choice(mine)
    hosts.run(host, "kill", f"-{signal.SIGKILL}", pid, check=False)
    return [f"{host}: {line[-60:]}"]


def same_as_alone(shared, alone):
    for part in ("train", "test"):
        files = shared / "files" / part
        pack(files, alone / "packed" / part, apply=lambda image: image[:16, :16])
    ranks.run(ranks.write(alone, TRAIN), ranks=1)
    expected, found = (torch.load(folder / "model.pt") for folder in (alone, shared))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)


def staged_right(hosts, packed):
    """Assert that complete staged files on each host are correct, and stage the others."""
    wanted = sums(hosts, "host0", packed)
    near = f"{NEAR}/paceline-stage-{os.getuid()}/{packed.name}-*"
    for host in ("host1", "host2"):
        assert set(sums(hosts, host, near)) <= set(wanted), host
    words = [ranks.PACELINE, "stage", packed, NEAR, "-H", "host1,host2"]
    hosts.run("host0", *words)
    for host in ("host1", "host2"):
        assert sums(hosts, host, near) == wanted, host


def sums(hosts, host, folder):
    look = f"cd {folder} && sha256sum shard-* index.bin"
    return hosts.run(host, "sh", "-c", look, check=False).stdout.splitlines()
