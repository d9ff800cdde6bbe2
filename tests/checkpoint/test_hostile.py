"""Checkpoints from an attacker: refused with an error, and no file outside of them is read."""

import errno
import json
import os
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from stores import KeyStore

from paceline.checkpoint import checkpoint_folder, state_tree
from paceline.checkpoint.manifest import DamagedCheckpointError, checksum
from paceline.checkpoint.saver import CheckpointSaver, find_newest_valid, load_checkpoint
from paceline.checkpoint.shard_content import verify_checkpoint
from paceline.checkpoint.shared_state import SharedState
from paceline.security.files import InvalidFileError


@pytest.fixture
def folder(tmp_path):
    saver = CheckpointSaver(tmp_path, 0, 1, None, print, 5.0)
    saver.save(1, SharedState({"weight": torch.ones(100)}), {"rank": 0}, {"epoch": 0})
    saver.wait()
    return tmp_path / "step-00000001"


def signed(folder, **changes):
    """Change the manifest and update its checksum."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text()) | changes
    body.pop("check", None)
    body["check"] = checksum(body)
    path.write_text(json.dumps(body))


def entry(path, name):
    data = Path(path).read_bytes()
    return {"name": name, "bytes": len(data), "crc32": zlib.crc32(data)}


def stored(folder, content):
    """Replace the content of the shard and update the manifest."""
    torch.save(content, folder / "rank-00000.pt")
    signed(folder, files=[entry(folder / "rank-00000.pt", "rank-00000.pt")])


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [1]},
        {"files": []},
        {"files": {"name": "rank-00000.pt"}},
        {"files": [{"name": "rank-00000.pt", "bytes": "1", "crc32": 0}]},
        {"files": [{"name": "rank-00000.pt", "bytes": 1e400, "crc32": 0}]},
        {"files": [{"name": "rank-00000.pt"}]},
        {"files": None},
        {"version": "1"},
        {"version": -1},
        {"version": [2]},
        {"step": "x"},
        {"epoch": -1},
        {"ranks": 1 << 40},
    ],
    ids=str,
)
def test_manifest_with_wrong_types_is_rejected(folder, changes):
    signed(folder, **changes)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json: ") as refused:
        verify_checkpoint(folder)
    assert isinstance(refused.value, InvalidFileError)


@pytest.mark.parametrize("how", ["above", "absolute", "deeper", "control"])
def test_shard_paths_outside_folder_are_rejected(folder, how):
    outside = folder.parent / "rank-00000.pt"
    outside.write_bytes((folder / "rank-00000.pt").read_bytes())
    (folder / "in").mkdir()
    (folder / "in" / "rank-00000.pt").write_bytes(outside.read_bytes())
    name = {
        "above": "../rank-00000.pt",
        "absolute": str(outside),
        "deeper": "in/rank-00000.pt",
        "control": "\x1b[2J",
    }[how]
    signed(folder, files=[entry(outside, name)])
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json: .*files\[0\]\.name"):
        verify_checkpoint(folder)


def test_symlinked_or_duplicate_shard_is_rejected(folder):
    shard = folder / "rank-00000.pt"
    signed(folder, files=[entry(shard, shard.name)] * 2)
    with pytest.raises(DamagedCheckpointError, match="names a shard twice"):
        verify_checkpoint(folder)
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to(folder.parent / "elsewhere")
    signed(folder, files=[entry(shard, shard.name)])
    with pytest.raises(
        DamagedCheckpointError, match=r"rank-00000\.pt: can't be read \(is a symbolic link\)"
    ):
        verify_checkpoint(folder)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.pt"])
def test_fifo_in_place_of_file_does_not_hang(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(DamagedCheckpointError, match=name):
        verify_checkpoint(folder)
    if name == "rank-00000.pt":
        with pytest.raises(DamagedCheckpointError, match="no regular file"):
            checkpoint_folder.read_shard(folder, name)


def test_compressed_shard_is_rejected(folder):
    shard = folder / "rank-00000.pt"
    torch.save({"x": torch.ones(9)}, shard)
    members = {one: zipfile.ZipFile(shard).read(one) for one in zipfile.ZipFile(shard).namelist()}
    with zipfile.ZipFile(shard, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in members.items():
            packed.writestr(name, data)
    with pytest.raises(
        DamagedCheckpointError, match=r"rank-00000\.pt: can't be loaded \(its members are comp"
    ):
        checkpoint_folder.read_shard(folder, shard.name)


WHOLE = {"shared": {}, "count": 0, "tensors": {}, "own": {}, "own_tensors": []}


@pytest.mark.parametrize(
    "content",
    [
        [1],
        {"shared": {}},
        WHOLE | {"tensors": {1: torch.ones(1)}},
        WHOLE | {"tensors": {"0": torch.ones(1)}},
        WHOLE | {"tensors": [torch.ones(1)]},
        WHOLE | {"own_tensors": [3]},
        WHOLE | {"own": {"__paceline_tensor__": 0}},
        WHOLE | {"own": {"__paceline_tensor__": "x"}},
        WHOLE | {"own": {"__paceline_array__": 1}},
        WHOLE | {"own": {"__paceline_deque__": 1}},
    ],
    ids=str,
)
def test_shard_with_invalid_content_is_rejected(folder, content):
    stored(folder, content)
    verify_checkpoint(folder)
    with pytest.raises(DamagedCheckpointError, match="step-00000001"):
        load_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["O", "object", "S8", "float64", "int32"])
def test_array_dtype_of_different_size_is_rejected(folder, dtype):
    array = {"__paceline_array__": (dtype, {"__paceline_tensor__": 0})}
    with pytest.raises(state_tree.SkeletonError, match="an array of type"):
        state_tree.unflatten(array, [torch.ones(3, dtype=torch.bfloat16)])


def test_deep_or_exponentially_nested_state_is_rejected(monkeypatch):
    monkeypatch.setattr(state_tree, "MAX_PARTS", 1000)
    many = [1]
    for _ in range(60):
        many = [many, many]
    deep = [1]
    for _ in range(5000):
        deep = [deep]
    for state in (many, deep):
        with pytest.raises(state_tree.SkeletonError, match="levels or"):
            state_tree.unflatten(state, [])


def test_folders_with_invalid_names_are_ignored(folder):
    for name in ("step-x", "step-1", "step-00000001.bak", "step-0000000000000000000000002"):
        (folder.parent / name).mkdir()
    assert checkpoint_folder.list_checkpoints(folder.parent) == [folder]
    assert find_newest_valid(folder.parent, print) == folder


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_write_probe_on_full_disk_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder.os, "write", full)
    with pytest.raises(ValueError, match=r"No space left on device.*HINT"):
        checkpoint_folder.check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_reported_once_for_all_ranks(tmp_path, monkeypatch):
    class Full(checkpoint_folder.ShardFile):
        def write(self, data):
            try:
                full()
            except OSError as error:
                self.error = error
                raise

    monkeypatch.setattr(checkpoint_folder, "ShardFile", Full)
    said, store = [], KeyStore()
    savers = [CheckpointSaver(tmp_path, rank, 3, store, said.append, 5.0) for rank in range(3)]
    for saver in savers:
        saver.save(7, SharedState({"weight": torch.ones(10000)}), {}, {})
    for saver in savers:
        saver.wait()
    assert said == [
        "the checkpoint of step 7 could not be written (ranks 0-2: No space left on device); "
        f"the training continues, and there is no checkpoint in {tmp_path}"
    ]
