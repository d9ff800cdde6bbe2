"""Early exit when the scheduler warns or ends a job: checkpoint, requeue exit code and resume."""

import json
import signal
import subprocess
import time

import pytest
import ranks
import torch
from scripts import TRAIN

ARGS = ["--samples", 400, "--dropout", 0.2]
SLOW = ["--sleep", 0.05, "--every", 1000]  # only an early exit saves inside an epoch (25 steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the result of an uninterrupted run of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(ranks.write(folder, TRAIN), folder / "out.pt", *ARGS)
    return torch.load(folder / "out.pt")


def assert_same_bits(one, other):
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
    assert one["rate"] == other["rate"]
    assert one["figures"][-1] == other["figures"][-1]


def checkpoints(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("ckpt/*/manifest.json"))]


def start(folder, *args, launcher="paceline"):
    """Start a launcher with two ranks that train, without waiting for the training to begin."""
    arguments = [folder / "out.pt", *ARGS, "--checkpoint", folder / "ckpt", *args]
    command = ranks.command(folder / "script.py", *arguments, launcher=launcher)
    return ranks.start(command, cwd=folder, stderr=subprocess.PIPE)


def left(job, kind):
    """Signal the launcher and return its messages once it has ended.

    The time limit allows for one step, the agreement of the ranks and their exit.
    """
    begun = time.monotonic()
    job.send_signal(kind)
    _, said = job.communicate(timeout=30)
    assert job.returncode == 75, said
    assert time.monotonic() - begun < 15
    assert "failed" not in said
    return said


@pytest.mark.long
def test_warned_job_checkpoints_exits_and_resumes_bitwise_equal(tmp_path, whole):
    script = ranks.write(tmp_path, TRAIN)
    first = start(tmp_path, *SLOW, launcher="paceline --max-restarts 2")
    ranks.wait_until(lambda: (tmp_path / "ckpt").exists())
    said = left(first, signal.SIGUSR1)
    assert "rank 0 received SIGUSR1: Paceline saves a checkpoint and ends the run early\n" in said
    (one,) = checkpoints(tmp_path)
    assert (one["epoch"], one["inside"]) == (0, True)
    assert (
        f"paceline: a checkpoint of step {one['step']} was written, and the job stopped early"
        in said
    )
    assert "(exit code 75). HINT: start the job again to continue\n" in said
    assert "the job restarts" not in said

    second = start(tmp_path, *SLOW)
    for line in second.stderr:
        if f"resuming from {tmp_path / 'ckpt'}/step-{one['step']:08}" in line:
            break
    said = left(second, signal.SIGTERM)
    assert "paceline: SIGTERM: the ranks write a checkpoint and stop within 25 s." in said
    *_, two = checkpoints(tmp_path)
    assert two["step"] > one["step"]
    assert f"a checkpoint of step {two['step']} was written, and the job stopped early" in said

    third = start(tmp_path)
    _, said = third.communicate(timeout=60)
    assert third.returncode == 0, said
    assert_same_bits(whole, torch.load(tmp_path / "out.pt"))
    assert ranks.alive(str(script)) == []


# Ranks that announce that they will leave, and then take long to write a checkpoint.
LONG = """
    import os, time
    from paceline.record.ring.launcher_messages import send_to_launcher
    send_to_launcher(leaves=True)
    print("leaves", flush=True)
    time.sleep(300)
    """


@pytest.fixture
def saving(tmp_path):
    """Yield a launcher whose ranks were asked to leave and are still running."""
    job = subprocess.Popen(
        ranks.command(ranks.write(tmp_path, LONG), launcher="paceline --fresh --max-restarts 1"),
        cwd=tmp_path,
        env=ranks.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if job.stdout.readline() != "leaves\n":  # only one of the two ranks so far
        job.stdout.readline()
    job.send_signal(signal.SIGTERM)
    assert "SIGTERM: the ranks write a checkpoint and stop" in job.stderr.readline()
    yield job
    job.kill()
    job.communicate()


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        (signal.SIGTERM, 143, "SIGTERM: Paceline ended all ranks"),
        pytest.param(
            signal.SIGINT, 130, "interrupted: Paceline ended all ranks", marks=pytest.mark.long
        ),
    ],
)
def test_second_signal_ends_ranks_that_write_checkpoint(tmp_path, saving, kind, code, words):
    begun = time.monotonic()
    saving.send_signal(kind)
    _, said = saving.communicate(timeout=20)
    assert saving.returncode == code
    assert time.monotonic() - begun < 6
    assert words in said
    assert ranks.alive(str(tmp_path / "script.py")) == []


@pytest.mark.long  # takes the whole time that ranks have to leave
def test_ranks_that_do_not_exit_within_grace_period_are_ended(tmp_path, saving):
    begun = time.monotonic()
    _, said = saving.communicate(timeout=40)
    assert saving.returncode == 143
    assert 20 < time.monotonic() - begun < 35
    assert "SIGTERM: Paceline ended all ranks" in said
    assert "the job restarts" not in said


@pytest.mark.long
def test_rank_killed_during_shutdown_is_reported_and_not_restarted(tmp_path, saving):
    script = str(tmp_path / "script.py")
    _, _, victim, *_ = ranks.family(saving.pid)  # launcher, rank server, rank
    subprocess.run(["kill", "-9", str(victim)], check=True)
    _, said = saving.communicate(timeout=20)
    assert saving.returncode == 137
    assert "was killed by SIGKILL" in said
    assert "the job restarts" not in said
    assert ranks.alive(script) == []


OWN = """
    import os, signal, sys
    import torch, paceline
    seen = []
    if "none" not in sys.argv:
        signal.signal(signal.SIGUSR1, lambda *_: seen.append("own"))
    world = paceline.init(progress=False)
    model = torch.nn.Linear(4, 1)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(64, 4))
    loader = world.shard(torch.utils.data.DataLoader(data, batch_size=4))
    for epoch in world.epochs(2, checkpoint="ckpt"):
        for (x,) in world.batches(loader):
            world.backward(model(x).mean())
            world.step(optimizer)
            os.kill(os.getpid(), signal.SIGUSR1)
    print("through", set(seen))
    """


def test_signal_handler_of_script_is_kept(tmp_path):
    result = ranks.run(ranks.write(tmp_path, OWN), launcher="python")
    assert "through {'own'}\n" in result.stdout


@pytest.mark.long  # same code as under the launcher
def test_warning_signal_without_launcher_writes_checkpoint(tmp_path):
    result = ranks.run(ranks.write(tmp_path, OWN), "none", launcher="python", check=False)
    assert result.returncode == 75, result.stderr
    assert (tmp_path / "ckpt/step-00000001").exists()
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_job_near_time_limit_checkpoints_and_exits_without_signal(tmp_path):
    limit = 'os.environ["PACELINE_END_TIME"] = str(time.time() + 2)\n    figures ='
    script = ranks.write(tmp_path, TRAIN.replace("figures =", limit, 1))
    args = [tmp_path / "out.pt", *ARGS, "--checkpoint", tmp_path / "ckpt", *SLOW]
    result = ranks.run(script, *args, ranks=1, launcher="python", check=False)
    assert result.returncode == 75, result.stderr
    assert "s of the job's time limit remain: Paceline saves a checkpoint" in result.stderr
    (one,) = checkpoints(tmp_path)
    assert one["step"] < 60


def test_invalid_end_time_is_rejected(tmp_path):
    script = ranks.write(tmp_path, "pass")
    result = ranks.run(script, check=False, PACELINE_END_TIME="2h")
    assert result.returncode == 2
    assert (
        "PACELINE_END_TIME='2h', which is not a time. HINT: give seconds since 1970"
        in result.stderr
    )


def submitted(slurm, folder, count):
    """Submit a job that can be requeued and return its ID once it has trained for some steps.

    By then the agents know that these ranks leave when they are warned.
    """
    script = ranks.write(folder, TRAIN)
    words = ["--hosts", count, "--ranks-per-host", 2 // count, "--time", "10min", "--requeue"]
    words += ["--output", f"{folder}/said", "--setup", "export OMP_NUM_THREADS=1"]
    words += ["--setup", f"export TORCHINDUCTOR_CACHE_DIR={folder}/torch"]
    args = [folder / "out.pt", *ARGS, *SLOW, "--checkpoint", folder / "ckpt"]
    told = slurm.run(ranks.PACELINE, "submit", *words, script, *args, cwd=folder)
    ranks.wait_until(lambda: (folder / "out.pt.under-way").exists(), 40)
    return told.stdout.strip()


@pytest.mark.long
def test_warned_slurm_job_is_requeued_and_completes(slurm, shared_folder, whole):
    job = submitted(slurm, shared_folder, 1)
    slurm.cancel(job, "-s", "USR1", "--batch")
    ranks.wait_until(lambda: "is requeued" in (shared_folder / "said").read_text(), 20)
    state, said = slurm.wait(job), (shared_folder / "said").read_text()
    assert state == "COMPLETED", said
    assert f"paceline: job {job} is requeued (scontrol requeue)\n" in said
    assert "the job stopped early (exit code 75)" in said
    assert "resuming from" in said
    assert_same_bits(whole, torch.load(shared_folder / "out.pt"))
    assert slurm.left_over() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "options", "state"),
    [
        (1, [], "CANCELLED"),
        (2, ["-s", "TERM"], "FAILED"),  # signals steps, not the batch script, like preemption
    ],
)
def test_cancelled_slurm_job_checkpoints_and_is_not_requeued(
    slurm, shared_folder, count, options, state
):
    job = submitted(slurm, shared_folder, count)
    slurm.cancel(job, *options)
    assert slurm.wait(job) == state
    said = (shared_folder / "said").read_text()
    (one,) = checkpoints(shared_folder)
    assert f"a checkpoint of step {one['step']} was written, and the job stopped early" in said
    assert "is requeued" not in said
    ranks.wait_until(lambda: slurm.left_over(0) == [], 10)
