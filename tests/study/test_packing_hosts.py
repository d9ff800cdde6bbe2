"""paceline pack -H: ranks on two nodes pack the same dataset as one process.

This holds also when a node fails.
"""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ranks
import sets

from paceline.data import Shards, pack

pytestmark = pytest.mark.long

MINE = """
import os, time

def slow(x):
    with open(f"calls-{os.uname().nodename}", "a") as file:
        file.write(f"{int(x.flat[0])}\\n")
    if not os.path.exists("go"):
        time.sleep(0.05)
    return x * 2
"""
ARRAYS = ("x.npy", "out", "--labels", "y.npy", "--shard-size", "1K", "--apply", "mine:slow")
COUNT = 400


@pytest.fixture
def folder(shared_folder):
    x, y = sets.arrays(COUNT)
    np.save(shared_folder / "x.npy", x)
    np.save(shared_folder / "y.npy", y)
    (shared_folder / "mine.py").write_text(MINE)
    return shared_folder


def started(hosts, folder, *words):
    command = [ranks.PACELINE, "pack", *ARRAYS, "--workers", "1", *words]
    return hosts.start("host0", *command, cwd=folder)


def packed(hosts, folder, *words, **options):
    return hosts.run("host0", ranks.PACELINE, "pack", *ARRAYS, *words, cwd=folder, **options)


def as_one_process(folder):
    """Check that the dataset is the one that one process packs."""
    x, y = sets.arrays(COUNT)
    pack(x * 2, folder / "one", y)
    one, out = Shards(folder / "one"), Shards(folder / "out")
    assert len(out) == COUNT
    for i in range(COUNT):
        assert np.array_equal(one[i][0], out[i][0])
        assert one[i][1] == out[i][1]
    assert out.meta.statistics["mean"] == pytest.approx(one.meta.statistics["mean"], rel=1e-6)
    assert not (folder / "out" / ".packing").exists()


def calls(folder, host):
    path = folder / f"calls-{host}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def packing_on(hosts, host):
    """Return the ranks on this host."""
    command = ["pgrep", "-f", "^rank [0-9]"]  # the title of a rank
    return hosts.run(host, *command, check=False, cwd=Path("/")).stdout.split()


def pieces(folder):
    return len(list((folder / "out" / ".packing").glob("piece-*")))


def test_packing_on_two_hosts_matches_one_process(hosts, folder):
    done = packed(hosts, folder, "-H", "host1:2,host2:1", "--json")
    assert json.loads(done.stdout)["samples"] == COUNT
    assert "3 ranks on 2 nodes over ssh" in done.stderr
    as_one_process(folder)
    assert min(calls(folder, "host1"), calls(folder, "host2")) > COUNT // 10
    assert hosts.left_over() == []


@pytest.mark.parametrize("host", ["host1", "host2"])
def test_packing_resumes_after_host_failure(hosts, folder, host):
    job = started(hosts, folder, "-H", "host1:1,host2:1")
    ranks.wait_until(lambda: pieces(folder) >= 4, 60)
    hosts.crash(host)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert f"on {host} was lost with its node" in " ".join(err.split())
    assert "Complete pieces are kept. HINT: repeat the same command" in err
    kept = pieces(folder)
    assert kept >= 4
    (folder / "go").touch()
    before = sum(calls(folder, name) for name in ("host1", "host2"))
    done = packed(hosts, folder, "-H", "host3,host4")  # one rank per core
    assert f"{2 * len(os.sched_getaffinity(0))} ranks on 2 nodes" in done.stderr
    as_one_process(folder)
    again = sum(calls(folder, name) for name in ("host0", "host3", "host4"))
    assert again < COUNT - 5 * kept
    assert before + again >= COUNT
    assert hosts.left_over(10) == []


def test_disconnected_host_that_keeps_packing_is_harmless(hosts, folder):
    job = started(hosts, folder, "-H", "host1:1,host2:1")
    ranks.wait_until(lambda: pieces(folder) >= 2, 60)
    hosts.link("host2", False)  # the agent does not notice that the launcher was killed
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate(timeout=30)
    assert packing_on(hosts, "host2")
    cut_off = calls(folder, "host2")
    ranks.wait_until(lambda: calls(folder, "host2") > cut_off, 20)
    (folder / "go").touch()
    packed(hosts, folder, "-H", "host1:2")
    as_one_process(folder)
    there = calls(folder, "host2")
    ranks.wait_until(lambda: not packing_on(hosts, "host2"))
    assert calls(folder, "host2") < there + COUNT // 4
    assert [path.name for path in sorted((folder / "out").iterdir()) if path.is_dir()] == []


def test_files_not_shared_between_hosts_are_reported(hosts, folder):
    words = ["-H", "host1:1,host2:1", "x.npy", "/tmp/out"]
    done = hosts.run("host0", ranks.PACELINE, "pack", *words, cwd=folder, check=False)
    assert done.returncode == 2
    assert "/tmp/out is another folder on host" in " ".join(done.stderr.split())
    assert "HINT: use a folder on a file system that all hosts share" in " ".join(
        done.stderr.split()
    )
    hosts.run("host0", "rm", "-rf", "/tmp/out", cwd=folder)
    hosts.run("host0", "cp", "x.npy", "/tmp", cwd=folder)
    words = ["-H", "host0:1,host2:1", "/tmp/x.npy", "out"]
    done = hosts.run("host0", ranks.PACELINE, "pack", *words, cwd=folder, check=False)
    assert done.returncode == 2
    assert "paceline: host2: /tmp/x.npy: No such file or directory" in done.stderr
    hosts.run("host0", "rm", "/tmp/x.npy", cwd=folder)
    assert hosts.left_over(10) == []


def test_packing_uses_all_hosts_of_slurm_allocation(slurm, folder):
    words = [ranks.PACELINE, "pack", *ARRAYS, "-n", "4", "--json"]
    done = slurm.run("salloc", "-N2", "-w", "host1,host2", *words, cwd=folder)
    assert json.loads(done.stdout)["samples"] == COUNT
    as_one_process(folder)
    assert min(calls(folder, "host1"), calls(folder, "host2")) > COUNT // 10
