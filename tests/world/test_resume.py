"""A killed and resumed run on the same number of ranks has bitwise the same result."""

import os
import re
import signal
from types import SimpleNamespace

import pytest
import ranks
import torch
from scripts import TRAIN

from paceline.parallel.mesh import Mesh
from paceline.security.run_lock import RunLock
from paceline.world.checkpointing import Checkpointer, CheckpointInterval
from paceline.world.collectives import Collectives


def start(folder, out, *args, number=2, launcher="paceline", check=True):
    script = folder / "script.py"
    if not script.exists():
        ranks.write(folder, TRAIN)
    args = ["--checkpoint", folder / "ckpt", "--every", 5, "--dropout", 0.2, *args]
    return ranks.run(script, folder / out, *args, ranks=number, launcher=launcher, check=check)


def undisturbed(folder, number, *args):
    script = ranks.write(folder, TRAIN)
    ranks.run(script, folder / "whole.pt", "--dropout", 0.2, *args, ranks=number)
    return torch.load(folder / "whole.pt")


def assert_same_bits(one, other):
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
    assert one["rate"] == other["rate"]
    assert one["figures"][-1] == other["figures"][-1]


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.long)])
def test_resume_after_kill_inside_epoch_is_bitwise_equal(tmp_path, number):
    whole = undisturbed(tmp_path, number)
    died = start(tmp_path, "out.pt", "--die-at", 22, number=number, check=False)
    assert died.returncode == 137
    result = start(tmp_path, "out.pt", number=number)
    assert "resuming from" in result.stderr
    # Checkpoints are written every 5 steps; the last one may be incomplete when the rank is killed.
    assert re.search(r"\(inside epoch 2, step (15|20)\)", result.stderr)
    assert_same_bits(whole, torch.load(tmp_path / "out.pt"))


def test_max_restarts_resumes_from_last_checkpoint(tmp_path):
    whole = undisturbed(tmp_path, 2)
    result = start(tmp_path, "out.pt", "--die-at", 22, launcher="paceline --max-restarts 2")
    assert "rank 1 was killed by SIGKILL" in result.stderr
    assert result.stderr.count("the job restarts from the last checkpoint (restart 1 of 2)") == 1
    assert_same_bits(whole, torch.load(tmp_path / "out.pt"))


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [2])
def test_resume_with_gradient_accumulation_and_batch_norm(tmp_path, accumulate):
    args = ["--accumulate", accumulate, "--batch-norm", "--samples", 200]
    whole = undisturbed(tmp_path, 2, *args)
    start(tmp_path, "out.pt", "--die-at", 13, *args, check=False)
    start(tmp_path, "out.pt", *args)
    assert_same_bits(whole, torch.load(tmp_path / "out.pt"))


def test_sigint_leaves_complete_checkpoint(tmp_path):
    whole = undisturbed(tmp_path, 2)
    args = ["--checkpoint", tmp_path / "ckpt", "--every", 1, "--dropout", 0.2, "--sleep", 0.05]
    script = tmp_path / "script.py"
    job = ranks.start(ranks.command(script, tmp_path / "out.pt", *args))
    ranks.wait_until(lambda: len(list(tmp_path.glob("ckpt/step-*"))) == 2)
    job.send_signal(signal.SIGINT)
    assert job.wait(20) == 130
    result = start(tmp_path, "out.pt")
    assert "resuming from" in result.stderr
    assert "is skipped" not in result.stderr  # no checkpoint was damaged
    assert_same_bits(whole, torch.load(tmp_path / "out.pt"))


def test_resume_of_finished_run_trains_no_steps(tmp_path):
    start(tmp_path, "out.pt")
    first = torch.load(tmp_path / "out.pt")
    again = start(tmp_path, "out.pt")
    assert "(after epoch 3, step 39)" in again.stderr
    second = torch.load(tmp_path / "out.pt")
    assert second["figures"] == []
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name])


def test_damaged_checkpoint_is_reported_and_previous_one_is_used(tmp_path):
    whole = undisturbed(tmp_path, 2)
    start(tmp_path, "out.pt", "--die-at", 22, check=False)
    *_, previous, newest = sorted(name for name in os.listdir(tmp_path / "ckpt") if name[0] != ".")
    shard = tmp_path / "ckpt" / newest / "rank-00001.pt"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    result = start(tmp_path, "out.pt")
    assert f"{newest}/rank-00001.pt: is damaged" in result.stderr
    assert f"{previous} (inside" in result.stderr
    assert_same_bits(whole, torch.load(tmp_path / "out.pt"))


def test_resume_with_different_world_size_keeps_sample_count(tmp_path):
    whole = undisturbed(tmp_path, 1)
    start(tmp_path, "out.pt", "--die-at", 22, number=4, check=False)
    start(tmp_path, "out.pt", number=2)
    last = torch.load(tmp_path / "out.pt")["figures"][-1]
    assert last[1] == whole["figures"][-1][1] == 203


def test_resume_inside_epoch_with_different_global_batch_is_rejected(tmp_path):
    start(tmp_path, "out.pt", "--die-at", 22, check=False)
    result = start(tmp_path, "out.pt", "--batch", 20, check=False)
    assert result.returncode == 1
    assert "HINT: world.shard(loader, global_batch=16)" in result.stderr


def test_checkpoint_of_different_model_is_rejected(tmp_path):
    start(tmp_path, "out.pt")
    result = start(tmp_path, "out.pt", "--batch-norm", check=False)
    assert result.returncode == 1
    assert "does not fit this script's models" in result.stderr
    assert "HINT" in result.stderr
    assert "paceline/world/training_state.py" not in result.stderr


@pytest.mark.parametrize("every", ["0.2s", "epoch", "2 epochs"])
def test_checkpoint_interval_in_seconds_and_epochs(tmp_path, every):
    script = ranks.write(tmp_path, TRAIN)
    args = ["--checkpoint", tmp_path / "ckpt", "--every", every, "--sleep", 0.02]
    ranks.run(script, tmp_path / "out.pt", *args)
    steps = sorted(int(name.removeprefix("step-")) for name in os.listdir(tmp_path / "ckpt"))
    assert steps[-1] == 39
    assert len(steps) == 2
    if every != "0.2s":
        assert steps[0] == 26
    else:
        assert steps[0] not in (13, 26) or steps[0] < 39


def test_unwritable_checkpoint_folder_is_rejected_before_training(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    (tmp_path / "file").write_text("")
    result = ranks.run(script, tmp_path / "o", "--checkpoint", tmp_path / "file/c", check=False)
    assert result.returncode == 1
    assert "checkpoints can't be written to" in result.stderr
    assert "HINT: set checkpoint=... of world.epochs to another folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_two_runs_do_not_train_in_one_checkpoint_folder(tmp_path):
    checkpoints = tmp_path / "ckpt"
    checkpoints.mkdir()
    other = RunLock(checkpoints, "checkpoint", "other")
    other.acquire(print)
    refused = start(tmp_path, "out.pt", check=False)
    assert refused.returncode == 1
    assert f"{checkpoints} is in use by run other (process {os.getpid()} on" in refused.stderr
    assert "Traceback" not in refused.stderr
    other.release()
    assert list(checkpoints.iterdir()) == []
    start(tmp_path, "out.pt")
    assert all(path.name.startswith("step-") for path in checkpoints.iterdir())


@pytest.mark.parametrize("launcher", ["paceline", "python"])
def test_training_whose_last_checkpoint_can_not_be_written_fails(tmp_path, launcher):
    script = ranks.write(
        tmp_path,
        """
        import os
        import torch, paceline
        from paceline.checkpoint import checkpoint_folder

        def full(*_):
            raise OSError(28, "No space left on device")

        checkpoint_folder.write_shard = full
        world = paceline.init(progress=False, record=False)
        for epoch in world.epochs(2, checkpoint="ckpt"):
            pass
        print("the script goes on")
        """,
    )
    result = ranks.run(script, ranks=2, launcher=launcher, check=False)
    assert result.returncode == 1
    assert "the script goes on" in result.stdout
    assert "No space left on device), and there is no checkpoint in ckpt" in result.stderr
    assert "HINT: check the free space: df -h ckpt" in result.stderr
    assert "previous checkpoint" not in result.stderr


def test_rank_that_can_write_checkpoints_names_the_rank_that_can_not(tmp_path):
    class OneFails(Collectives):
        def gather(self, value, schema):
            return ["disk full. HINT: free space", value]

    training = SimpleNamespace(models=[], optimizers=[])
    saver = SimpleNamespace(directory=tmp_path, rank=1, size=2, warn=print, lock=lambda say: None)
    state = SimpleNamespace(shared_state=dict, rank_state=dict, training=training)
    collectives = OneFails(Mesh(1, 2), lambda: None)
    interval = CheckpointInterval.parse("epoch")
    checkpointer = Checkpointer(saver, interval, state, None, collectives, print)
    with pytest.raises(ValueError, match=r"^rank 0 can't save checkpoints: disk full. HINT: free"):
        checkpointer.prepare()
