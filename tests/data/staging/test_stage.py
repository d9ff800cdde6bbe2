"""``paceline stage``: shards on node-local storage, complete or absent, and read from there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import ranks
import sets
from needs import need

from paceline.cluster.topology.local_resources import file_system_type
from paceline.data import DataError, Loader, Shards, pack, shards
from paceline.data.staging import stage as staging
from paceline.data.staging import staged_sets
from paceline.data.staging.stage import stage
from paceline.data.staging.staged_sets import VARIABLE


@pytest.fixture
def packed(tmp_path):
    """Pack ten shards of ten samples."""
    x, y = sets.arrays(100, (50,))
    pack((x, y), tmp_path / "set", shard_bytes=2000)
    return tmp_path / "set"


def reads(folder):
    return {int(x[0]): int(y) for x, y in map(Shards(folder).__getitem__, range(100))}


def test_staged_dataset_is_read_from_local_storage(packed, tmp_path, monkeypatch):
    done = stage(packed, tmp_path / "disk")
    assert (done.shards, done.here, done.copied, done.left) == (10, 10, 10, [])
    wanted = reads(packed)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "disk"))
    one = Shards(packed)
    for file in packed.glob("shard-*.bin"):  # the origin is not read
        file.write_bytes(bytes(file.stat().st_size))
    assert {int(x[0]): int(y) for x, y in map(one.__getitem__, range(100))} == wanted
    assert len(Loader(packed, 10)) == 10
    again = stage(packed, tmp_path / "disk")
    assert (again.here, again.copied) == (10, 0)


def test_readers_switch_to_shards_staged_meanwhile(packed, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "disk"))
    monkeypatch.setattr(shards, "LOOK_S", 0.0)
    staged_sets.open_staged(packed, tmp_path / "disk", make=True).close()
    one = Shards(packed)
    first = [one[i][0][0] for i in range(100)]
    stage(packed, tmp_path / "disk")
    [one[i] for i in range(100)]
    for file in packed.glob("shard-*.bin"):
        file.write_bytes(bytes(file.stat().st_size))
    assert [one[i][0][0] for i in range(100)] == first


def test_shards_without_local_space_are_read_from_origin(packed, tmp_path, monkeypatch):
    size = Shards(packed).meta.shards[0].bytes
    beside = sum((packed / name).stat().st_size for name in ("index.bin", "paceline.json"))
    done = stage(packed, tmp_path / "disk", room=4 * size + beside + 10)
    assert (done.here, len(done.left)) == (4, 6)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "disk"))
    assert sorted(reads(packed)) == list(range(100))


def test_least_recently_used_dataset_is_evicted(packed, tmp_path):
    x, y = sets.arrays(100, (50,), seed=1)
    for name in ("other", "third"):
        pack((x, y), tmp_path / name, shard_bytes=2000)
    whole = sum(one.bytes for one in Shards(packed).meta.shards)
    room = 2 * whole + 20_000
    first = stage(tmp_path / "other", tmp_path / "disk", room=room).folder
    stage(packed, tmp_path / "disk", room=room)
    os.utime(first / ".used", (1, 1))
    done = stage(tmp_path / "third", tmp_path / "disk", room=room)
    assert done.evicted == [first.name]
    assert done.here == 10
    assert not first.exists()


def test_repacked_dataset_is_not_read_from_stale_copy(packed, tmp_path, monkeypatch):
    stage(packed, tmp_path / "disk")
    shutil.rmtree(packed)
    x, y = sets.arrays(100, (50,), seed=9)
    pack((x + 1000, y), packed, shard_bytes=2000)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "disk"))
    assert min(reads(packed)) >= 1000


def test_corrupted_shard_is_not_staged(packed, tmp_path):
    path = packed / "shard-00003.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"shard-00003\.bin: a byte has changed"):
        stage(packed, tmp_path / "disk")
    folder = staged_sets.staged_path(packed, tmp_path / "disk")
    assert not (folder / path.name).exists()
    assert not list(folder.glob(".*.part"))


def test_corrupted_index_is_not_staged(packed, tmp_path):
    path = packed / "index.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"index\.bin: a byte has changed"):
        stage(packed, tmp_path / "disk")


def test_damaged_staged_shard_is_reported(packed, tmp_path, monkeypatch):
    folder = stage(packed, tmp_path / "disk").folder
    data = bytearray((folder / "shard-00000.bin").read_bytes())
    data[10] ^= 1
    (folder / "shard-00000.bin").write_bytes(data)
    (folder / "shard-00001.bin").write_bytes(b"short")  # left by a node that died
    monkeypatch.setenv(VARIABLE, str(tmp_path / "disk"))
    with pytest.raises(DataError, match=rf"{folder}/shard-00000\.bin: sample \d+ at byte"):
        reads(packed)
    assert stage(packed, tmp_path / "disk").copied == 1
    assert Shards(packed)[15] is not None


def command(*words, **more):
    made = [sys.executable, "-m", "paceline", "stage", *map(str, words)]
    return subprocess.Popen(made, stdout=-1, stderr=-1, text=True, **more)


def test_concurrent_staging_copies_dataset_once(packed, tmp_path):
    both = [command(packed, tmp_path / "disk", "--json") for _ in range(2)]
    told = [json.loads(one.communicate(timeout=60)[0]) for one in both]
    assert sorted(one["copied"] for one in told) == [0, 10]
    assert all(one["here"] == 10 for one in told)


def test_killed_staging_leaves_only_complete_shards(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 250_000)).astype(np.float32)
    pack(x, tmp_path / "set", shard_bytes=3 << 20, statistics=0)
    folder = staged_sets.staged_path(tmp_path / "set", tmp_path / "disk")
    running = command(tmp_path / "set", tmp_path / "disk")
    ranks.wait_until(lambda: len(list(folder.glob("shard-*"))) > 2)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    there = [p for p in folder.iterdir() if p.name.startswith("shard-")]
    told = {one.file: one.bytes for one in Shards(tmp_path / "set").meta.shards}
    assert all(p.stat().st_size == told[p.name] for p in there)
    done = stage(tmp_path / "set", tmp_path / "disk")
    assert done.here == len(told)
    assert not list(folder.glob(".*.part"))


def test_invalid_arguments_are_reported(packed, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="the folder does not exist"):
        stage(tmp_path / "nothing", tmp_path / "disk")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="HINT: choose a folder of this host"):
        stage(packed, tmp_path / "file")
    monkeypatch.delenv(VARIABLE, raising=False)
    running = command(packed)
    assert (
        "the destination folder is missing. HINT: paceline stage SOURCE ROOT"
        in running.communicate()[1]
    )


def test_full_disk_keeps_complete_shards(packed, tmp_path, monkeypatch):
    need(["root"] if os.geteuid() else [])
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=44k", "tmpfs", disk], check=True)
    try:
        # Another job fills the disk after this check.
        monkeypatch.setattr(staging, "free_space", lambda _: 1 << 30)
        with pytest.raises(ValueError, match=r"No space left on device.*HINT: make room, or limit"):
            stage(packed, disk)
        monkeypatch.setenv(VARIABLE, str(disk))
        assert list(staged_sets.staged_path(packed, disk).glob("shard-*"))
        assert not list(staged_sets.staged_path(packed, disk).glob(".*.part"))
        assert len(reads(packed)) == 100
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        assert stage(packed, disk).here == 10
    finally:
        subprocess.run(["umount", disk], check=True)


# root, but subject to file modes
PLAIN_ROOT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def test_changed_permission_is_reported_and_training_continues(packed, tmp_path):
    need(["root"] if os.geteuid() else [])
    folder = stage(packed, tmp_path / "disk").folder
    shards_there = sorted(folder.glob("shard-*"))
    for shard in shards_there[5:]:
        shard.unlink()
    folder.chmod(0o500)
    words = [*PLAIN_ROOT, sys.executable, "-m", "paceline", "stage", packed, tmp_path / "disk"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 2
    assert "Permission denied. HINT: choose a folder of this host that you can write to" in (
        " ".join(done.stderr.split())
    )
    shards_there[0].chmod(0)
    script = "from paceline.data import Shards; import sys; s = Shards(sys.argv[1]); "
    script += "print(len([s[i] for i in range(len(s))]))"
    words = [*PLAIN_ROOT, sys.executable, "-c", script, packed]
    near = ranks.environment(**{VARIABLE: str(tmp_path / "disk")})
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=near)
    assert done.stdout == "100\n", done.stderr


def test_free_space_of_tmpfs_is_limited_by_available_memory():
    assert file_system_type(Path("/dev/shm")) in ("tmpfs", "ramfs")
    told = Path("/proc/meminfo").read_text()
    available = int(told.split("MemAvailable:")[1].split()[0]) << 10
    assert 0 < staging.free_space(Path("/dev/shm")) < 1.2 * available


def test_reading_during_staging(packed, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "disk"))
    monkeypatch.setattr(shards, "LOOK_S", 0.0)
    staged_sets.open_staged(packed, tmp_path / "disk", make=True).close()
    loader = Loader(packed, 10, shuffle=True, num_workers=3)
    thread = threading.Thread(target=stage, args=(packed, tmp_path / "disk"))
    thread.start()
    for _ in range(5):
        assert sorted(int(v) for x, _ in loader for v in x[:, 0]) == list(range(100))
    thread.join()


STAGED = """
import os, sys, time
import paceline
from paceline.data import Loader
world = paceline.init()
loader = world.shard(Loader(sys.argv[1], 5, shuffle=True))
root, deadline = os.environ["PACELINE_STAGE"], time.monotonic() + 30
def whole():
    return sum(name.startswith("shard-") for _, _, names in os.walk(root) for name in names) == 10
while True:
    seen = sum(len(y) for _, y in world.batches(loader))
    if whole() or time.monotonic() > deadline:
        break
print(f"rank {world.rank} saw {seen}, whole {whole()}")
"""


@pytest.mark.long
def test_run_stages_dataset_during_training(packed, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STAGED)
    root = tmp_path / "near"
    root.mkdir()
    words = [ranks.PACELINE, "run", "-n", "2", "--stage", packed, script, packed]
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=120,
        env=ranks.environment(PACELINE_STAGE=str(root)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 saw 50, whole True" in done.stdout
    assert "rank 1 saw 50, whole True" in done.stdout
    (folder,) = (root / f"paceline-stage-{os.getuid()}").glob("set-*")
    here = {name: data for name, data in sets.contents(folder).items() if name[0] != "."}
    assert here == sets.contents(packed)
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True,
                          env=ranks.environment())  # fmt: skip
    assert done.returncode == 2
    assert "the destination folder is missing. HINT: set PACELINE_STAGE" in done.stderr
