"""Committing a checkpoint: after a kill at any moment a complete one is left."""

import errno
import os
import signal

import pytest
import torch
from stores import KeyStore

from paceline.checkpoint import checkpoint_folder, unfinished_folder
from paceline.checkpoint.saver import CheckpointSaver, find_newest_valid, load_checkpoint
from paceline.checkpoint.shared_state import SharedState
from paceline.checkpoint.unfinished_folder import UnfinishedFolder


def saver(folder, warned):
    return CheckpointSaver(folder, 0, 1, None, warned.append, 5.0)


def save(folder, step, value=1.0):
    warned = []
    one = saver(folder, warned)
    one.save(step, SharedState({"weight": torch.full((100,), value)}), {}, {})
    one.wait()
    return warned


def weight(folder):
    return load_checkpoint(find_newest_valid(folder, pytest.fail))[0]["weight"][0].item()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def commit_and_die(folder, module, function, number):
    """Commit step 7 again in another process; kill that after call ``number`` of a function."""
    new = UnfinishedFolder(folder / ".step-00000007.1.tmp")
    shard = torch.load(folder / "step-00000007/rank-00000.pt") | {"tensors": {0: torch.ones(1)}}
    entry = checkpoint_folder.write_shard(new, 0, shard)
    call = getattr(module, function)
    calls = 0

    def call_and_die(*args, **options):
        nonlocal calls
        result = call(*args, **options)
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    pid = os.fork()
    if pid == 0:
        try:
            setattr(module, function, call_and_die)
            checkpoint_folder.commit(new, folder / "step-00000007", {"step": 7, "files": [entry]})
        finally:
            os._exit(0)
    new.close()
    return os.waitpid(pid, 0)[1] == signal.SIGKILL


FUNCTIONS = [
    *((os, name) for name in ("rename", "fsync", "replace", "unlink", "rmdir")),
    (unfinished_folder, "exchange_names"),
]


@pytest.mark.parametrize("exchange", [True, False])
def test_step_saved_again_leaves_a_checkpoint_whenever_it_is_killed(
    tmp_path, monkeypatch, exchange
):
    if not exchange:  # as on NFS
        monkeypatch.setattr(unfinished_folder, "exchange_names", lambda *_: False)
    killed = []
    for module, function in FUNCTIONS:
        for number in range(1, 5):
            folder = tmp_path / f"{function}-{number}"
            folder.mkdir()
            save(folder, 7, 3.0)
            if commit_and_die(folder, module, function, number):
                killed.append(function)
            if exchange:  # at any moment, without a repair
                assert weight(folder) in (1.0, 3.0)
            checkpoint_folder.remove_unfinished(folder)
            assert names(folder) == ["step-00000007"]
            assert weight(folder) in (1.0, 3.0)
    assert killed.count("rename") == (0 if exchange else 2)
    assert "exchange_names" in killed


def test_only_a_complete_checkpoint_gets_its_name_back(tmp_path):
    """One that was being removed when the process ended must not replace a complete one."""
    for name, value in (("0" * 16, 1.0), ("f" * 16, 2.0), ("8" * 16, 3.0)):
        save(tmp_path, 7, value)
        (tmp_path / "step-00000007").rename(tmp_path / f".step-00000007.{name}.old.tmp")
    (tmp_path / f".step-00000007.{'0' * 16}.old.tmp/rank-00000.pt").unlink()
    (tmp_path / f".step-00000007.{'8' * 16}.old.tmp/manifest.json").unlink()
    no_proof = tmp_path / f".step-00000007.{'8' * 16}.old.tmp"  # Paceline removes it last
    assert checkpoint_folder.remove_unfinished(tmp_path) == [no_proof]
    assert names(tmp_path) == [no_proof.name, "step-00000007"]
    assert weight(tmp_path) == 2.0


@pytest.mark.parametrize("change", ["missing", "short"])
def test_checkpoint_without_all_shards_is_not_committed(tmp_path, change):
    """As if rank 1 had written to a folder of its node."""
    warned, store = [], KeyStore()
    save(tmp_path, 1)
    savers = [CheckpointSaver(tmp_path, rank, 2, store, warned.append, 5.0) for rank in range(2)]
    savers[1].save(4, SharedState({"weight": torch.ones(3)}), {}, {})
    savers[1].wait()
    shard = tmp_path / ".step-00000004.1.tmp/rank-00001.pt"
    if change == "missing":
        shard.unlink()
    else:
        os.truncate(shard, 10)
    savers[0].save(4, SharedState({"weight": torch.ones(3)}), {}, {})
    savers[0].wait()
    (line,) = warned
    assert "rank 0 finds no complete shard of rank 1 in" in line
    assert "same folder on all nodes" in line
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("steps", [(99_999_999, 100_000_000, 100_000_001), (2, 10**9, 10**10)])
def test_steps_are_ordered_by_number(tmp_path, steps):
    for step in steps:
        assert save(tmp_path, step, float(step % 7)) == []
    found = [path.name for path in checkpoint_folder.list_checkpoints(tmp_path)]
    assert found == [f"step-{step:08}" for step in (steps[2], steps[1])]
    assert weight(tmp_path) == steps[2] % 7


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_without_fsync_of_folders_is_reported_once(tmp_path, monkeypatch, code):
    fsync = os.fsync

    def refuse_folders(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    warned = []
    one = saver(tmp_path, warned)
    for step in (1, 2):
        one.save(step, SharedState({"weight": torch.ones(3)}), {}, {})
        one.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    (line,) = warned
    assert str(tmp_path) in line
    assert "fsync" in line


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_failed_flush_of_the_directory_leaves_a_complete_checkpoint(
    tmp_path, monkeypatch, exchange, again
):
    if not exchange:  # as on NFS
        monkeypatch.setattr(unfinished_folder, "exchange_names", lambda *_: False)
    if again:
        save(tmp_path, 7, 3.0)
    fsync = os.fsync

    def fail_for_directory(fd):
        if os.path.realpath(f"/proc/self/fd/{fd}") == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail_for_directory)
    (line,) = save(tmp_path, 7, 1.0)
    assert "the checkpoint of step 7 was written, but" in line
    assert "Input/output error" in line
    assert weight(tmp_path) == 1.0
    # The replaced one is kept too: the names may be lost with the server's memory.
    assert len(names(tmp_path)) == 1 + again
    checkpoint_folder.remove_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000007"]
    assert weight(tmp_path) == 1.0


def test_checkpoint_gets_its_name_back_if_it_can_not_be_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished_folder, "exchange_names", lambda *_: False)
    save(tmp_path, 7, 3.0)
    rename = os.rename

    def fail_for_new_one(source, target, **options):
        if str(source).endswith(".1.tmp"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", fail_for_new_one)
    (line,) = save(tmp_path, 7, 1.0)
    assert "could not be written (Input/output error)" in line
    assert names(tmp_path) == ["step-00000007"]
    assert weight(tmp_path) == 3.0


def private(folder):
    """Create a folder of the user's that is not a checkpoint."""
    folder.mkdir()
    for name in ("model.bin", "rank-00000.pt", "manifest.json"):
        (folder / name).write_text("private")
    return folder


def test_old_folders_of_others_are_not_removed(tmp_path):
    older, newer = (private(tmp_path / f"step-{step:08}") for step in (1, 99))
    for step in (2, 3, 4):
        assert save(tmp_path, step) == []
    assert names(tmp_path) == [older.name, "step-00000003", "step-00000004", newer.name]
    for folder in (older, newer):
        assert names(folder) == ["manifest.json", "model.bin", "rank-00000.pt"]


def test_other_files_in_an_old_checkpoint_are_not_removed(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "step-00000002/config.json").write_text("private")
    for step in (3, 4, 5):
        assert save(tmp_path, step) == []
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert names(tmp_path / "step-00000002") == ["config.json"]


def test_checkpoint_of_another_step_is_not_removed(tmp_path):
    """Another user may rename it in a folder without sticky bit."""
    save(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000000")
    for step in (3, 4):
        save(tmp_path, step)
    hidden = tmp_path / ".step-00000003.1.tmp"
    (tmp_path / "step-00000004").rename(hidden)
    assert checkpoint_folder.remove_unfinished(tmp_path) == [hidden]
    assert names(tmp_path) == [hidden.name, "step-00000000", "step-00000003"]
    assert names(hidden) == ["manifest.json", "rank-00000.pt"]


@pytest.mark.parametrize("name", [".step-00000007.1.tmp", f".step-00000007.{'0' * 16}.old.tmp"])
def test_hidden_folders_of_others_are_not_removed(tmp_path, name):
    folder = private(tmp_path / name)
    assert checkpoint_folder.remove_unfinished(tmp_path) == [folder]
    assert names(folder) == ["manifest.json", "model.bin", "rank-00000.pt"]


def test_unfinished_checkpoint_is_removed_without_files_of_others(tmp_path):
    for name, others in ((".step-00000007.1.tmp", []), (".step-00000007.2.tmp", ["model.bin"])):
        folder = UnfinishedFolder(tmp_path / name)
        checkpoint_folder.write_shard(folder, 0, {"tensors": {}})
        folder.close()
        for one in others:
            (tmp_path / name / one).write_text("private")
    assert checkpoint_folder.remove_unfinished(tmp_path) == [tmp_path / name]
    assert names(tmp_path / name) == ["model.bin"]


@pytest.mark.parametrize("exchange", [True, False])
def test_replaced_folder_of_others_is_not_removed(tmp_path, monkeypatch, exchange):
    if not exchange:  # as on NFS
        monkeypatch.setattr(unfinished_folder, "exchange_names", lambda *_: False)
    private(tmp_path / "step-00000007")
    assert save(tmp_path, 7) == []
    assert weight(tmp_path) == 1.0
    (other,) = tmp_path.glob("step-00000007.*.replaced")
    assert names(other) == ["manifest.json", "model.bin", "rank-00000.pt"]


def test_complete_checkpoint_gets_its_name_if_the_process_ended_before(tmp_path):
    save(tmp_path, 7)
    (tmp_path / "step-00000007").rename(tmp_path / ".step-00000007.1.tmp")
    assert checkpoint_folder.remove_unfinished(tmp_path) == []
    assert names(tmp_path) == ["step-00000007"]
