"""State of an interrupted pack, changed by an attacker: discarded, or refused in one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sets

from paceline.data import Shards, pack
from paceline.data.packing.pieces import Partition
from paceline.data.packing.unfinished import WORK_FOLDER
from paceline.data.sources.folder_source import FolderSource
from paceline.security.files import InvalidFileError
from paceline.study.packing import PackRequest, Task


@pytest.fixture(autouse=True)
def _no_hang():
    """Let an endless wait for a file end the test instead of the test run."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("ends", [b"", b"1", b"\xff" * 32, (1 << 40).to_bytes(8, "little")])
def test_damaged_file_listing_is_rebuilt(tmp_path, ends):
    folder = sets.images(tmp_path / "in", 6)
    (tmp_path / "work").mkdir()
    FolderSource(folder, None, tmp_path / "work").close()
    (tmp_path / "work" / "listing.ends").write_bytes(ends)
    found = FolderSource(folder, None, tmp_path / "work")
    assert len({found.name(i) for i in range(len(found))}) == 6
    found.close()


@pytest.mark.parametrize(
    "change",
    [b"[]", b"\xff", b"[" * 100000, {"left": -1}, {"asked": {}}, {"cut": {"first": 0, "each": 0}}],
)
def test_damaged_task_file_is_reported(tmp_path, change):
    Task(PackRequest("x", "y"), Partition(0, 2, 4), [0, 1], "arrays", "x", False, 0, 0, False).save(
        tmp_path
    )
    assert Task.load(tmp_path).cut == Partition(0, 2, 4)
    if isinstance(change, dict):
        change = json.dumps(json.loads((tmp_path / "task.json").read_bytes()) | change).encode()
    (tmp_path / "task.json").write_bytes(change)
    with pytest.raises(InvalidFileError, match=r"task\.json: (can't|does not)"):
        Task.load(tmp_path)


@pytest.fixture
def stopped(tmp_path):
    """Return (source, folder) of a pack that was interrupted with two complete shards."""
    x = np.arange(64.0).reshape(16, 4)
    np.save(tmp_path / "x.npy", x)

    def step(done: int, size: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "x.npy", tmp_path / "out", shard_bytes=128, workers=1, step=step)
    assert (tmp_path / "out" / WORK_FOLDER / "shard-00001.json").exists()
    return tmp_path / "x.npy", tmp_path / "out"


def whole(folder: Path) -> bool:
    found = sorted(array.tobytes() for array in Shards(folder))
    return found == sorted(row.tobytes() for row in np.arange(64.0).reshape(16, 4))


@pytest.mark.parametrize(
    "damage",
    [
        {"shard": 3},
        {"next": -1},
        {"next": 1 << 80},
        {"left_out": [1]},
        {"alike": [["float64", [-1]]]},
        {"statistics": {"mean": [1.0], "classes": []}},
        {"statistics": {"samples": 1, "count": 1.0, "mean": [1.0], "squares": [], "classes": []}},
        {"shard": {"file": "../x", "samples": 4, "bytes": 128, "crc": 0}},
        {"shard": {"file": "shard-00000.bin", "samples": 5, "bytes": 128, "crc": 0}},
        b"[" * 100000,
        b"\xff",
    ],
    ids=str,
)
def test_damaged_shard_state_is_discarded(stopped, damage):
    source, folder = stopped
    path = folder / WORK_FOLDER / "shard-00001.json"
    if isinstance(damage, dict):
        damage = json.dumps(json.loads(path.read_bytes()) | damage).encode()
    path.write_bytes(damage)
    assert pack(source, folder, shard_bytes=128).went_on_at == 4
    assert whole(folder)


@pytest.mark.parametrize("cut", [{"first": 8, "each": 0}, {"samples": 1 << 60}, [], b"\0"], ids=str)
def test_damaged_partition_state_is_discarded(stopped, cut):
    source, folder = stopped
    told = {"first": 8, "each": 1, "samples": 16, "channels": None}
    data = cut if isinstance(cut, bytes) else json.dumps(told | cut if cut else cut).encode()
    (folder / WORK_FOLDER / "pieces.json").write_bytes(data)
    (folder / WORK_FOLDER / "piece-000000").mkdir()
    assert pack(source, folder, shard_bytes=128).meta.samples == 16
    assert whole(folder)


@pytest.mark.parametrize("plan", [b"[1]", b"", b"{", b"[" * 100000])
def test_damaged_plan_is_rejected_in_one_line(stopped, plan):
    source, folder = stopped
    (folder / WORK_FOLDER / "plan.json").write_bytes(plan)
    with pytest.raises(ValueError, match=r"plan\.json: .* HINT: discard it: fresh=True") as error:
        pack(source, folder, shard_bytes=128)
    assert "\n" not in str(error.value)
    pack(source, folder, shard_bytes=128, fresh=True)
    assert whole(folder)


@pytest.mark.parametrize("name", ["lock", "plan.json", "shard-00000.json", "rows-00000"])
def test_state_file_that_is_a_fifo_does_not_block(stopped, name):
    source, folder = stopped
    (folder / WORK_FOLDER / name).unlink()
    os.mkfifo(folder / WORK_FOLDER / name)
    if name in ("lock", "plan.json"):
        with pytest.raises(ValueError, match="is a FIFO and no regular file"):
            pack(source, folder, shard_bytes=128)
    else:
        pack(source, folder, shard_bytes=128)
        assert whole(folder)


def test_links_in_working_folder_are_not_followed(stopped, tmp_path):
    """The targets of the links are neither removed nor overwritten."""
    source, folder = stopped
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").write_text("kept")
    for name in ("shard-00002.part", ".shard-00002.json.part", "rows.part", ".plan.json.part"):
        (folder / WORK_FOLDER / name).unlink(missing_ok=True)
        (folder / WORK_FOLDER / name).symlink_to(other / "kept")
    (folder / ".paceline.json.part").symlink_to(other / "kept")
    (folder / WORK_FOLDER / "run-x").symlink_to(other)
    (folder / WORK_FOLDER / "piece-000009").symlink_to(other)
    pack(source, folder, shard_bytes=128)
    assert whole(folder)
    pack(source, folder, shard_bytes=128, fresh=True)
    assert (other / "kept").read_text() == "kept"
    assert [p.name for p in other.iterdir()] == ["kept"]


def test_working_folder_that_is_a_link_is_rejected(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_text("kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / WORK_FOLDER).symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="is a symbolic link"):
        pack(np.zeros((4, 2)), tmp_path / "out", fresh=True)
    assert (tmp_path / "other" / "kept").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
@pytest.mark.parametrize("size", ["48k", "200k", "520k"])
def test_full_disk_is_reported_once_and_packing_can_resume(tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(400, 256)))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        words = ["pack", tmp_path / "x.npy", disk / "out", "--shard-size", "100k"]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *map(str, words)], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr.count("No space left on device") == 1
        assert done.stderr.count("\n") == 1
        left = [str(p.relative_to(disk)) for p in disk.rglob("*") if p.is_file()]
        assert not [name for name in left if ".part" in name], left
    finally:
        subprocess.run(["umount", disk], check=True)
