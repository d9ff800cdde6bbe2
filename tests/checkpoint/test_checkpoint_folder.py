"""Checkpoints on disk: complete or absent, damage is reported, no stored code is executed."""

import json
import os
import pickle
import random
import threading
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch

from paceline.checkpoint import checkpoint_folder, manifest, state_tree
from paceline.checkpoint.saver import (
    KEPT_CHECKPOINTS,
    CheckpointSaver,
    find_newest_valid,
    load_checkpoint,
)
from paceline.checkpoint.shard_content import verify_checkpoint
from paceline.checkpoint.shared_state import SharedState


def saver(folder, warned=None, rank=0, size=1, store=None):
    return CheckpointSaver(
        folder, rank, size, store, (warned if warned is not None else []).append, 5.0
    )


def save(folder, step, value=1.0):
    one = saver(folder)
    one.save(step, SharedState({"weight": torch.full((100,), value)}), {"rank": 0}, {"epoch": 0})
    one.wait()


def test_save_and_load_state_round_trip(tmp_path):
    state = {
        "model": OrderedDict(weight=torch.randn(3, 4), count=torch.tensor(7)),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.999)},
        "python": random.getstate(),
        "numpy": np.random.RandomState(3).get_state(legacy=False),
        "more": [None, True, 1.5, "text", b"bytes", {1, 2}, deque([1, 2]), np.float64(0.25)],
        "arrays": [np.arange(4, dtype=np.uint64), np.array(1.0)],
        "half": torch.randn(5).to(torch.bfloat16),
    }
    one = saver(tmp_path)
    one.save(12, SharedState(state), {"own": torch.ones(2)}, {"epoch": 3})
    one.wait()
    folder = find_newest_valid(tmp_path, print)
    assert folder.name == "step-00000012"
    shared, own, manifest = load_checkpoint(folder)
    assert torch.equal(shared["model"]["weight"], state["model"]["weight"])
    assert torch.equal(shared["half"], state["half"])
    assert shared["optimizer"]["betas"] == (0.9, 0.999)
    assert shared["optimizer"]["state"][0]["step"] == 3.0
    assert shared["python"] == state["python"]
    np.random.RandomState(0).set_state(shared["numpy"])
    assert shared["more"] == state["more"]
    assert shared["arrays"][0].dtype == np.uint64
    assert np.array_equal(shared["arrays"][0], state["arrays"][0])
    assert torch.equal(own[0]["own"], torch.ones(2))
    assert manifest["epoch"] == 3


def test_changes_after_save_are_not_in_checkpoint(tmp_path):
    weight = torch.zeros(1000)
    one = saver(tmp_path)
    one.save(1, SharedState({"weight": weight}), {}, {})
    weight += 1
    one.wait()
    assert load_checkpoint(find_newest_valid(tmp_path, print))[0]["weight"].sum() == 0


def test_save_writes_asynchronously(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = checkpoint_folder.write_shard

    def slow_disk(*args):
        assert may_write.wait(20)
        return write(*args)

    monkeypatch.setattr(checkpoint_folder, "write_shard", slow_disk)
    one = saver(tmp_path)
    one.save(
        1, SharedState({"weight": torch.ones(10)}), {}, {}
    )  # returns before anything is written
    assert one.busy
    assert checkpoint_folder.list_checkpoints(tmp_path) == []
    may_write.set()
    one.wait()
    assert find_newest_valid(tmp_path, print).name == "step-00000001"


@pytest.mark.parametrize("value", [lambda: 0, object(), {"deep": [{"f": print}]}])
def test_unsupported_state_value_is_rejected_before_writing(tmp_path, value):
    with pytest.raises(ValueError, match=r"state\['ema'\].* can't hold.*HINT"):
        saver(tmp_path).save(1, SharedState({"ema": value}), {}, {})
    assert list(tmp_path.iterdir()) == []


def test_only_newest_two_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    assert [p.name for p in checkpoint_folder.list_checkpoints(tmp_path)] == [
        "step-00000004",
        "step-00000003",
    ]
    assert KEPT_CHECKPOINTS == 2


def test_checkpoint_of_same_step_is_replaced(tmp_path):
    save(tmp_path, 5, 1.0)
    save(tmp_path, 5, 2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    assert load_checkpoint(find_newest_valid(tmp_path, print))[0]["weight"][0] == 2.0


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": lambda folder: flip(folder / "rank-00000.pt"),
    "a flipped bit in the manifest": lambda folder: flip(folder / "manifest.json"),
    "cut off": lambda folder: os.truncate(folder / "rank-00000.pt", 100),
    "empty": lambda folder: os.truncate(folder / "rank-00000.pt", 0),
    "a shard missing": lambda folder: (folder / "rank-00000.pt").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "an empty manifest": lambda folder: (folder / "manifest.json").write_text(""),
    "somebody else's manifest": lambda folder: (folder / "manifest.json").write_text('{"a": 1}'),
    "a list as manifest": lambda folder: (folder / "manifest.json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_reported_and_previous_one_is_used(tmp_path, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    DAMAGES[damage](tmp_path / "step-00000002")
    warned = []
    assert find_newest_valid(tmp_path, warned.append).name == "step-00000001"
    (line,) = warned
    assert "step-00000002/rank-00000.pt" in line or "step-00000002/manifest.json" in line


def test_verify_detects_bit_flip_at_any_position(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    whole = (folder / "rank-00000.pt").read_bytes()
    for at in random.Random(0).sample(range(len(whole)), 60):
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        (folder / "rank-00000.pt").write_bytes(data)
        with pytest.raises(checkpoint_folder.DamagedCheckpointError, match=r"rank-00000\.pt"):
            verify_checkpoint(folder)


def test_error_if_all_checkpoints_are_damaged(tmp_path):
    save(tmp_path, 1)
    DAMAGES["a flipped bit"](tmp_path / "step-00000001")
    with pytest.raises(ValueError, match=r"contains no valid checkpoint.*HINT"):
        find_newest_valid(tmp_path, lambda _: None)


def test_loading_malicious_shard_executes_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    save(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    for data in (pickle.dumps(Evil(), protocol=2), None):
        path = folder / "rank-00000.pt"
        torch.save(Evil(), path) if data is None else path.write_bytes(data)
        body = json.loads((folder / "manifest.json").read_text())
        body.pop("check")
        body["files"] = [files_entry(path)]
        body["check"] = manifest.checksum(body)
        (folder / "manifest.json").write_text(json.dumps(body))
        # The checksums are right, as in a checkpoint that an attacker wrote.
        verify_checkpoint(folder)
        with pytest.raises(
            checkpoint_folder.DamagedCheckpointError, match=r"rank-00000\.pt: can't be loaded"
        ):
            load_checkpoint(folder)
        assert not (tmp_path / "ran").exists()


def files_entry(path):
    import zlib

    data = path.read_bytes()
    return {"name": path.name, "bytes": len(data), "crc32": zlib.crc32(data)}


def test_full_disk_is_reported_and_previous_checkpoint_is_kept(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_folder.os, "fsync", full)
    warned = []
    one = saver(tmp_path, warned)
    one.save(2, SharedState({"weight": torch.ones(3)}), {}, {})
    one.wait()
    assert "step 2 could not be written" in warned[0]
    assert "No space left" in warned[0]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_unwritable_folder_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"can't be written to .*file/ckpt.*HINT"):
        checkpoint_folder.check_writable(tmp_path / "file" / "ckpt")


def test_replicated_tensors_are_assigned_evenly_to_ranks():
    tensors = [torch.zeros(n) for n in (1000, 10, 500, 490, 7, 0)]
    owner = state_tree.assign_owners(tensors, 2)
    load_of = [
        sum(t.numel() for t, o in zip(tensors, owner, strict=True) if o == r) for r in (0, 1)
    ]
    assert abs(load_of[0] - load_of[1]) <= 10
    assert state_tree.assign_owners(tensors, 1) == [0] * 6


class Keys:
    """A key-value store for several ranks in one process."""

    def __init__(self):
        self.keys = {}

    def set(self, key, value):
        self.keys[key] = value.encode()

    def get(self, key):
        return self.keys[key]

    def check(self, keys):
        return all(key in self.keys for key in keys)


def test_sharded_checkpoint_is_written_evenly_and_loaded_whole(tmp_path):
    store = Keys()
    shared = {"a": torch.ones(100), "b": torch.ones(100) * 2, "c": torch.ones(100) * 3}
    savers = [saver(tmp_path, rank=rank, size=3, store=store) for rank in range(3)]
    for rank, one in enumerate(savers):
        one.save(4, SharedState(shared), {"rank": rank}, {})
    for one in savers:
        one.wait()
    folder = find_newest_valid(tmp_path, print)
    sizes = [(folder / f"rank-0000{rank}.pt").stat().st_size for rank in range(3)]
    assert max(sizes) < 1.5 * min(sizes)
    state, own, _ = load_checkpoint(folder)
    assert [state[name].mean().item() for name in "abc"] == [1.0, 2.0, 3.0]
    assert [part["rank"] for part in own] == [0, 1, 2]


def test_checkpoint_is_not_committed_if_rank_times_out(tmp_path):
    warned = []
    one = CheckpointSaver(tmp_path, 0, 2, Keys(), warned.append, timeout=0.1)
    one.save(4, SharedState({}), {}, {})
    one.wait()
    assert "rank 1 did not write the shard within" in warned[0]
    assert list(tmp_path.iterdir()) == []
