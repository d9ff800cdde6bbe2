"""Names in the checkpoint folder that an attacker created first: links, files, folders."""

import os
import re
from pathlib import Path

import pytest
import torch
from stores import KeyStore

from paceline.checkpoint import checkpoint_folder
from paceline.checkpoint.saver import CheckpointSaver, load_checkpoint
from paceline.checkpoint.shared_state import SharedState
from paceline.checkpoint.unfinished_folder import UnfinishedFolder

NOBODY = 65534


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim.txt"
    path.write_text("precious")
    return path


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def save(directory, step=7, ranks=1):
    """Save one checkpoint from ``ranks`` ranks; return the warnings."""
    warnings, store = [], KeyStore()
    savers = [
        CheckpointSaver(directory, rank, ranks, store if ranks > 1 else None, warnings.append, 5.0)
        for rank in range(ranks)
    ]
    for saver in savers:
        saver.save(step, SharedState({"weight": torch.ones(3)}), {}, {})
    for saver in reversed(savers):
        saver.wait()
    return warnings


@pytest.mark.parametrize("name", ["rank-00000.pt", "manifest.json"])
def test_symlink_in_temporary_folder_is_replaced(directory, victim, name):
    planted = directory / ".step-00000007.1.tmp"
    planted.mkdir()
    (planted / name).symlink_to(victim)
    assert save(directory) == []
    assert victim.read_text() == "precious"
    assert not (directory / "step-00000007" / name).is_symlink()
    assert torch.equal(load_checkpoint(directory / "step-00000007")[0]["weight"], torch.ones(3))


def test_hard_link_in_temporary_folder_is_replaced(directory, victim):
    planted = directory / ".step-00000007.1.tmp"
    planted.mkdir()
    os.link(victim, planted / "rank-00000.pt")
    assert save(directory) == []
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("ranks", [1, 3])
def test_symlink_as_temporary_folder_is_rejected_once(directory, tmp_path, ranks):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (directory / ".step-00000007.1.tmp").symlink_to(elsewhere)
    (warning,) = save(directory, ranks=ranks)
    assert ".step-00000007.1.tmp is a symbolic link, not a folder" in warning
    assert list(elsewhere.iterdir()) == []
    assert checkpoint_folder.list_checkpoints(directory) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("ranks", [1, 3])
def test_temporary_folder_of_other_user_is_rejected_once(directory, ranks):
    planted = directory / ".step-00000007.1.tmp"
    planted.mkdir()
    (planted / "theirs").write_text("")
    os.chown(planted, NOBODY, NOBODY)
    (warning,) = save(directory, ranks=ranks)
    assert f".step-00000007.1.tmp belongs to user {NOBODY}" in warning
    assert [path.name for path in planted.iterdir()] == ["theirs"]


def test_replaced_temporary_folder_is_not_committed(directory):
    path = directory / ".step-00000007.1.tmp"
    folder = UnfinishedFolder(path)
    path.rename(directory / "moved")
    path.mkdir()
    with pytest.raises(OSError, match="was replaced by another folder"):
        checkpoint_folder.commit(folder, directory / "step-00000007", {"step": 7, "files": []})
    folder.close()
    assert not (directory / "step-00000007").exists()


def test_write_probe_does_not_follow_symlink(directory, victim):
    (directory / f".probe-{os.getpid()}").symlink_to(victim)
    checkpoint_folder.check_writable(directory)
    assert victim.read_text() == "precious"
    assert (directory / f".probe-{os.getpid()}").is_symlink()


def test_remove_unfinished_does_not_follow_symlinks(directory, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    (directory / ".step-00000007.1.tmp").symlink_to(elsewhere)
    (directory / ".step-00000008.1.tmp").write_text("")
    UnfinishedFolder(directory / ".step-00000009.1.tmp").close()
    (directory / ".step-00000009.1.tmp" / "rank-00000.pt").symlink_to(elsewhere / "kept")
    checkpoint_folder.remove_unfinished(directory)
    assert list(directory.iterdir()) == []
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]


@pytest.mark.parametrize("dangling", [False, True])
def test_symlink_with_name_of_checkpoint_is_replaced(directory, tmp_path, dangling):
    elsewhere = tmp_path / "elsewhere"
    if not dangling:
        elsewhere.mkdir()
        (elsewhere / "kept").write_text("")
    (directory / ".step-00000007.old.tmp").symlink_to(elsewhere)
    (directory / "step-00000007").symlink_to(elsewhere)
    assert save(directory) == []
    assert not (directory / "step-00000007").is_symlink()
    assert [path.name for path in elsewhere.glob("*")] == ([] if dangling else ["kept"])


def test_file_with_name_of_checkpoint_is_kept(directory):
    (directory / "step-00000007").write_text("precious")
    (warning,) = save(directory)
    assert re.search("step-00000007 is a regular file, not a folder", warning)
    assert [path.name for path in directory.iterdir()] == ["step-00000007"]
    assert Path(directory / "step-00000007").read_text() == "precious"
