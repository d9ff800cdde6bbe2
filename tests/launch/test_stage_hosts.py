"""``paceline stage`` and ``run --stage`` on several hosts: each shard is read only once."""

import json

import numpy as np
import pytest
import ranks

from paceline.data import pack

pytestmark = pytest.mark.long
NEAR = "/tmp/near"  # separate on each host

TRAIN = """
    import os, time, glob
    import paceline
    from paceline.data import Loader

    world = paceline.init(progress=False)
    loader = world.shard(Loader("set", 5, shuffle=True))
    root, deadline = os.environ["PACELINE_STAGE"], time.monotonic() + 60
    while True:
        seen = sum(len(y) for _, y in world.batches(loader))
        whole = len(glob.glob(f"{root}/paceline-stage-0/set-*/shard-*")) == 20
        if not world.any(not whole) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if world.local_rank == 0:
        print("whole:", whole, flush=True)
    """


@pytest.fixture
def packed(shared_folder):
    """Pack a dataset of 20 shards of 1 MB."""
    x = np.random.default_rng(0).integers(0, 256, (200, 100_000), dtype=np.uint8)
    pack((x, np.arange(200)), shared_folder / "set", shard_bytes=1_000_000)
    return shared_folder / "set"


def content(hosts, host):
    look = f"cd {NEAR}/paceline-stage-0/set-* && sha256sum shard-* index.bin"
    return hosts.run(host, "sh", "-c", look).stdout


def original(hosts, packed):
    return hosts.run("host0", "sh", "-c", f"cd {packed} && sha256sum shard-* index.bin").stdout


def test_stage_copies_to_all_hosts_and_reads_each_byte_once(hosts, packed):
    names = ["host1", "host2", "host3"]
    words = [ranks.PACELINE, "stage", "set", NEAR, "-H", ":4,".join(names), "--json"]
    told = json.loads(hosts.run("host0", *words, cwd=packed.parent).stdout)
    files = [*packed.glob("shard-*"), packed / "index.bin"]
    assert told["read"] == sum(path.stat().st_size for path in files)
    assert [(one["host"], one["here"], one["copied"]) for one in told["hosts"]] == [
        (name, 20, 20) for name in names
    ]
    for name in names:
        assert content(hosts, name) == original(hosts, packed)
    # If one host can't write its copy, that host is reported and the other hosts get theirs.
    hosts.run("host2", "rm", "-r", NEAR)
    hosts.run("host2", "touch", NEAR)
    done = hosts.run("host0", *words[:-1], cwd=packed.parent, check=False)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert "host2: /tmp/near: Not a directory. HINT: choose a folder of this" in said
    assert "host3: /tmp/near/paceline-stage-0/set-" in said
    assert said.count("20 of 20 shards are on the node") == 2


def test_stage_continues_if_host_with_pending_shards_is_stopped(hosts, packed):
    ranks.write(packed.parent, TRAIN)
    words = [ranks.PACELINE, "run", "-H", "host1:1,host2:1", "--stage", "set", "script.py"]
    near = {"PACELINE_STAGE": NEAR, "NO_COLOR": "1"}
    job = hosts.start("host0", *words, cwd=packed.parent, env=near)
    stop = ["pkill", "-STOP", "-f", "stage --beside"]
    ranks.wait_until(lambda: hosts.run("host2", *stop, check=False).returncode == 0, 60)
    first = f"ls {NEAR}/paceline-stage-0/set-*/shard-* | wc -l"
    ranks.wait_until(lambda: hosts.run("host1", "sh", "-c", first).stdout == "20\n", 60)
    hosts.run("host2", "pkill", "-CONT", "-f", "stage --beside")
    out, err = job.communicate(timeout=90)
    assert job.returncode == 0, err
    assert "whole: True" in out
    for name in ("host1", "host2"):
        assert content(hosts, name) == original(hosts, packed)
    assert "on 2 nodes: 40 shards copied" in " ".join(err.split())
    assert not [line for line in hosts.left_over(5) if NEAR not in line]
