"""A lost host returns: the job continues at full size with the same result."""

import json

import pytest
import ranks
import torch
from scripts import TRAIN

ARGS = ["--samples", 400, "--epochs", 5]
SLOW = ["--sleep", 0.12, "--every", 10]  # slow enough for a host to return during the job
JOB = ["--max-restarts", "3", "--min-hosts", "1"]


def start(hosts, folder, *words):
    """Start a job on host0 with ranks on host1 and host2; wait for its first checkpoint.

    The script writes its result into ``out.pt``.
    """
    script = ranks.write(folder, TRAIN)
    words = [*words, "--hang-timeout", "3", "-H", "host1,host2"]
    args = [*words, script, "out.pt", *ARGS, *SLOW, "--checkpoint", "ckpt"]
    job = hosts.start("host0", ranks.PACELINE, "run", *JOB, *args, cwd=folder)
    ranks.wait_until(lambda: (folder / "ckpt/step-00000010/manifest.json").exists(), 40)
    return job


def read_until(job, text):
    """Read the launcher's messages up to a line that contains ``text`` and return them."""
    said = ""
    for line in job.stderr:
        said += line
        if text in line:
            return said
    raise AssertionError(f"never said: {text}\n{said}")


@pytest.mark.long
def test_lost_host_rejoins_job_with_same_result(hosts, shared_folder):
    ranks.run(ranks.write(shared_folder, TRAIN), shared_folder / "whole.pt", *ARGS)
    record = shared_folder / "record"
    job = start(hosts, shared_folder, "--record", record)
    hosts.crash("host2")
    read_until(
        job, "host2 is lost; the job continues on 1 of 2 nodes, with 1 of 2 ranks, from the last"
    )
    hosts.boot("host2")
    _, said = job.communicate(timeout=90)
    assert job.returncode == 0, said
    back = "paceline: host2 is back: the ranks write a checkpoint, and the job continues at full"
    assert said.count(back) == 1
    again = "paceline: host2 is back; the job continues on 2 of 2 nodes, with 2 of 2 ranks"
    assert f"{again}, from the last checkpoint\n" in said  # does not count against --max-restarts
    whole, found = (torch.load(shared_folder / name) for name in ("whole.pt", "out.pt"))
    # Tolerances, because one rank and two ranks sum in different orders.
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(found["model"][name], tensor, rtol=1e-3, atol=1e-4)
    assert found["figures"][-1] == pytest.approx(whole["figures"][-1], rel=1e-3)
    report = hosts.run("host0", ranks.PACELINE, "report", "--json", record).stdout
    assert json.loads(report)["ranks"] == [0, 1]
    assert {path.name for path in record.glob("attempt-*/*.ring")} == {"rank-0.ring"}
    assert hosts.left_over(10) == []


STAYS = """
    import os, sys, time
    attempt, size = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["WORLD_SIZE"]
    open(f"up-{attempt}-{os.environ['RANK']}-of-{size}", "w")
    while not os.path.exists(f"end-{attempt}"):
        time.sleep(0.1)
    sys.exit(7 if attempt == "1" else 0)
    """


@pytest.mark.long
def test_host_rejoins_at_next_attempt_if_script_does_not_exit_early(hosts, shared_folder):
    """The network of the host returns; ranks that still run there are ended first."""
    ranks.write(shared_folder, STAYS)
    command = [ranks.PACELINE, "run", "--fresh", *JOB, "-H", "host1,host2", "script.py"]
    job = hosts.start("host0", *command, cwd=shared_folder)
    ranks.wait_until(lambda: len(list(shared_folder.glob("up-0-*"))) == 2, 30)
    hosts.link("host2", False)
    # Killing ssh reports the loss at once. --hang-timeout can't be used, because these ranks make
    # no progress, same as ranks that hang.
    hosts.run("host0", "pkill", "-KILL", "-f", "ssh .*host2", check=False)
    read_until(
        job, "host2 is lost; the job continues on 1 of 2 nodes, with 1 of 2 ranks, from the last"
    )
    ranks.wait_until(lambda: (shared_folder / "up-1-0-of-1").exists())
    hosts.link("host2", True)
    said = read_until(job, "host2 is back; it takes part in the next attempt")
    (shared_folder / "end-1").touch()
    ranks.wait_until(lambda: len(list(shared_folder.glob("up-2-*-of-2"))) == 2, 30)
    assert "continues at full size" not in said
    (shared_folder / "end-2").touch()
    _, said = job.communicate(timeout=30)
    assert job.returncode == 0, said
    assert "host2 is back; the job continues on 2 of 2 nodes, with 2 of 2 ranks" in said
    assert hosts.left_over(10) == []
