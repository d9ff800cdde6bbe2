"""paceline pack -n: ranks pack the same dataset as one process, also when ranks are killed."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import ranks
import sets

from paceline.data import Shards, pack
from paceline.data.shards import ScratchBuffer

# The applied functions write their PID and the sample, and are slow until the file "go" exists.
MINE = """
import ctypes, os, sys, time
import numpy as np

def noted(x):
    assert "torch" not in sys.modules
    with open("calls", "a") as file:
        file.write(f"{os.getpid()} {int(x.flat[0])}\\n")
    if x.flat[0] >= 0 and not os.path.exists("go"):
        time.sleep(0.05)
    return x * 2

libc = ctypes.PyDLL(None)  # its functions keep the interpreter's lock

def holds(x):
    began = time.monotonic()
    libc.usleep(20_000)
    with open("times", "a") as file:
        file.write(f"{os.getpid()} {began} {time.monotonic()}\\n")
    return x - 1

def odd(x):
    if int(x.flat[0]) % 50 == 17:
        raise RuntimeError("it is odd")
    return x + 1

def samples():
    for i in range(300):
        yield np.full((3, 4), i, "float32"), i % 5
"""
COUNT = 300


@pytest.fixture
def folder(tmp_path):
    x, y = sets.arrays(COUNT)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


ARRAYS = ("x.npy", "--labels", "y.npy", "--shard-size", "1K")


def started(folder, *words, **env):
    return subprocess.Popen(
        [ranks.PACELINE, "pack", *map(str, words)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ranks.environment(COLUMNS="200", **env),
        start_new_session=True,
    )


def command(folder, *words, check=True, **env):
    process = started(folder, *words, **env)
    out, err = process.communicate(timeout=120)
    if check and process.returncode:
        raise AssertionError(f"{process.returncode}\n{out}\n{err}")
    return process.returncode, out, err


def content(folder):
    """Return everything in a dataset except shard boundaries and packing time."""
    shards = Shards(folder)
    samples = []
    for i in range(len(shards)):
        row, data, label = shards.read_raw(i, ScratchBuffer())
        name = shards.name(i) if shards.meta.names else ""
        samples.append((bytes(data), np.asarray(label).tolist(), name, row.encoding, row.shape))
    meta = json.loads((folder / "paceline.json").read_text())
    for part in (meta, meta["packed"]):
        for key in ("checksum", "shards", "statistics", "date"):
            part.pop(key, None)
    return samples, meta


def same(one, other):
    assert content(one) == content(other)
    here, there = (Shards(folder).meta.statistics for folder in (one, other))
    assert here["of"] == there["of"]
    assert here.get("classes") == there.get("classes")
    for name in ("mean", "deviation"):
        assert here[name] == pytest.approx(there[name], rel=1e-12)
    assert not (one / ".packing").exists()
    known = {"paceline.json", "index.bin", "names.txt"}
    left = {path.name for path in one.iterdir()} - known
    assert left == {shard.file for shard in Shards(one).meta.shards}


def whole_pieces(folder):
    return len(list((folder / "out" / ".packing").glob("piece-*")))


@pytest.mark.long
@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3]
)
def test_packing_on_ranks_matches_one_process(folder, count):
    sets.images(folder / "images", 120)
    command(folder, "images", "one", "--statistics", 50)
    _, out, err = command(
        folder, "-n", count, "images", "out", "--statistics", 50, "--shard-size", "4K", "--json"
    )
    same(folder / "out", folder / "one")
    told = json.loads(out)
    assert (told["samples"], told["classes"], told["left_out"]) == (120, list(sets.CLASSES), [])
    assert len(told["shards"]) > 8
    assert err == ""
    _, out, _ = command(folder, "--check", "out")
    assert "all samples are unchanged" in out


@pytest.mark.long
def test_gil_bound_apply_function_runs_in_parallel_on_ranks(folder):
    words = [*ARRAYS, "--compress", "--apply", "mine:holds"]
    command(folder, *words, "one")
    (alone,) = _calls_by_process(folder)
    assert alone[-1][1] - alone[0][0] > 0.02 * COUNT  # the threads wait for each other
    (folder / "times").unlink()
    command(folder, "-n", 2, *words, "out")
    same(folder / "out", folder / "one")
    one, other = [calls for calls in _calls_by_process(folder) if len(calls) > 40]
    assert len(one) + len(other) == COUNT
    assert _overlapping(one, other) > COUNT // 4


def _calls_by_process(folder):
    """Return the start and end of each call, per process."""
    found = {}
    for line in (folder / "times").read_text().splitlines():
        pid, began, ended = line.split()
        found.setdefault(pid, []).append((float(began), float(ended)))
    return list(found.values())


def _overlapping(some, others):
    """Count the calls that began during a call of the other process."""
    return sum(any(a < began < b for a, b in others) for began, _ in some)


@pytest.mark.long
def test_stream_is_spooled_once_and_packed_by_all_ranks(folder):
    command(folder, "mine:samples", "one")
    command(folder, "-n", 2, "mine:samples", "out", "--shard-size", "1K")
    same(folder / "out", folder / "one")
    assert Shards(folder / "out").meta.packed["source"] == "mine:samples"


@pytest.mark.long
@pytest.mark.parametrize(
    ("who", "then"),
    [
        ("rank", ("-n", 3)),
        ("launcher", ()),
        pytest.param("rank", (), marks=pytest.mark.long),
        pytest.param("launcher", ("-n", 3), marks=pytest.mark.long),
    ],
)
def test_killed_packing_resumes_with_complete_pieces(folder, who, then):
    words = [*ARRAYS, "--apply", "mine:noted", "--workers", 1, "out"]
    job = started(folder, "-n", 2, *words)
    ranks.wait_until(lambda: whole_pieces(folder) >= 5, 30)
    assert len(_running_in(folder)) >= 3
    if who == "launcher":
        job.kill()
        job.communicate(timeout=30)
    else:
        rank = max(Counter(_callers(folder)).items(), key=lambda item: item[1])[0]
        os.kill(rank, signal.SIGKILL)
        _, err = job.communicate(timeout=30)
        assert job.returncode == 2
        assert re.search(r"rank \d was killed by SIGKILL", err)
        assert "Complete pieces are kept. HINT: repeat the same command" in err
        assert not list((folder / "out" / ".packing").glob("run-*"))
    ranks.wait_until(lambda: not _running_in(folder))
    pieces = whole_pieces(folder)
    assert not (folder / "out" / "paceline.json").exists()
    (folder / "go").touch()
    before = len(_callers(folder))
    command(folder, *then, *words)
    (folder / "calls").rename(folder / "all-calls")
    command(folder, *words[:-1], "one")
    same(folder / "out", folder / "one")
    each = len(_callers(folder, "all-calls")) - before
    assert each < COUNT - 5 * pieces  # calls for complete pieces are not repeated


def _running_in(folder):
    """Return the processes whose working directory is the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink() == folder:
                found.append(path.parent.name)
    return found


def _callers(folder, name="calls"):
    path = folder / name
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.long
def test_interrupt_leaves_only_complete_pieces(folder):
    words = ["-n", 2, *ARRAYS, "--apply", "mine:noted", "--workers", 1, "out"]
    job = started(folder, *words)
    ranks.wait_until(lambda: whole_pieces(folder) >= 2, 30)
    os.killpg(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 130
    assert "Traceback" not in err
    work = folder / "out" / ".packing"
    assert {path.name.rstrip("0123456789") for path in work.iterdir()} == {
        *(".paceline", "lock", "pieces.json", "plan.json", "piece-"),
    }
    assert not _running_in(folder)
    (folder / "go").touch()
    command(folder, *words)
    command(folder, *words[2:-1], "one")
    same(folder / "out", folder / "one")


@pytest.mark.long
def test_unpackable_sample_is_reported_as_by_one_process(folder):
    x = np.load(folder / "x.npy")
    for i, one in enumerate(x):
        path = folder / "in" / "ab"[i % 2] / f"{i:04}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, one)
    bad = folder / "in" / "b" / "0151.npy"
    bad.write_bytes(b"no array")
    words = ["in", "--shard-size", "1K"]
    code, _, alone = command(folder, *words, "one", check=False)
    code, out, err = command(folder, "-n", 2, *words, "out", check=False)
    assert (code, out, err) == (2, "", alone)
    assert "b/0151.npy (sample 225)" in err  # 150 samples of class a, then index 75 of class b
    assert "HINT: repair the sample and repeat the same command" in err
    np.save(bad, x[151])
    command(folder, "-n", 2, *words, "out")
    command(folder, *words, "one")
    same(folder / "out", folder / "one")


@pytest.mark.long
def test_skipped_samples_are_counted_over_all_ranks(folder):
    words = [*ARRAYS, "--apply", "mine:odd", "--on-error", "skip", "--json"]
    _, out, _ = command(folder, *words, "one")
    alone = json.loads(out)["left_out"]
    _, out, _ = command(folder, "-n", 2, *words, "out")
    assert json.loads(out)["left_out"] == alone
    assert len(alone) == 6
    assert "apply mine:odd: RuntimeError: it is odd" in alone[0]
    same(folder / "out", folder / "one")


def test_packing_without_valid_samples_leaves_no_files(folder):
    (folder / "none.py").write_text("def fails(x):\n    raise RuntimeError('never')\n")
    words = ["-n", 2, *ARRAYS, "--apply", "none:fails", "--on-error", "skip", "out"]
    code, _, err = command(folder, *words, check=False)
    assert code == 2
    assert "none of 300 samples could be packed" in err
    assert list((folder / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "2", "--check", "out"], "--check runs in one process. HINT: leave out -n"),
        (["-n", "2", "x.npy", "out", "--to", "hdf5"], "--to runs in one process. HINT"),
        (["--env", "A=1", "x.npy", "out"], "--env A=1 needs ranks. HINT: add -n or -H"),
        (["-n", "0", "x.npy", "out"], "-n 0: at least one rank is needed. HINT: -n 1"),
        (
            ["--launcher", "ssh", "x.npy", "out"],
            "--launcher ssh needs host names outside of an allocation. HINT",
        ),
        (
            ["-H", "a:1,b:1", "-n", "3", "x.npy", "out"],
            "-n 3: 3 ranks need as many slots, and the nodes have 2 slots (a:1, b:1)",
        ),
        (["-n", "2", "nowhere", "out"], "nowhere: the file or folder does not exist"),
        (["-n", "2", "x.npy", "done"], "done contains a packed dataset. HINT"),
        (
            ["-n", "2", "x.npy", "out", "--apply", "no:such"],
            "no:such can't be imported: No module named 'no'",
        ),
    ],
)
def test_invalid_arguments_are_reported_before_any_rank_starts(folder, words, said):
    pack(np.zeros((3, 2)), folder / "done")
    code, _, err = command(folder, *words, check=False)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not list(folder.glob("out/*"))


def test_packing_without_n_in_slurm_job_reports_how_to_use_all_nodes(folder):
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    _, _, err = command(folder, *ARRAYS, "out", **allocation)
    assert (
        err == "paceline: threads of this node pack; -n N uses ranks on all nodes of Slurm job 7\n"
    )
