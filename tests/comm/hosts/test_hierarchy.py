"""Collectives between hosts: results equal to PyTorch's on any layout of ranks, and errors."""

import re
import time

import pytest
import ranks
import torch
from collectives import ANY, FAILS, SAME, TRAINS

from paceline.comm.hosts.rank_placement import place_ranks

UNEVEN = "host1:3,host2:1,host3:2"
MORE = [
    *("host1:1,host2:1", "host1:2,host2:2"),
    *("host1:1,host2:2", "host1:3,host2:3", "host1:2,host2:2,host3:2", "host1:1,host2:3,host3:1"),
    *("host1:1,host2:1,host3:1,host4:1", "host1:2,host2:1,host3:3,host4:1"),
    "host1:3,host2:3,host3:3,host4:3",
]
ALGORITHMS = ["direct", "doubling", "halving", "ring", "tree"]


def run(hosts, folder, text, where, *words, check=True, **env):
    ranks.write(folder, text)
    more = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    command = [ranks.PACELINE, "run", "-H", where, *more, "script.py", *words]
    return hosts.run("host0", *command, cwd=folder, check=check, timeout=120)


def as_expected(hosts, folder, where, count, **env):
    """Run random collectives and assert that all results are correct on every rank."""
    names = where.split(",")
    done = run(hosts, folder, ANY, where, len(names), count, len(names) + 1, **env)
    size = sum(int(one.partition(":")[2]) for one in names)
    assert done.stdout.count("all as expected") == size, done.stdout + done.stderr


def test_all_collectives_match_expected_results(hosts, shared_folder):
    as_expected(hosts, shared_folder, UNEVEN, 40)


@pytest.mark.long
@pytest.mark.parametrize("where", MORE)
def test_collectives_on_each_rank_layout(hosts, shared_folder, where):
    as_expected(hosts, shared_folder, where, 60)


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_collectives_with_each_algorithm(hosts, shared_folder, name):
    as_expected(hosts, shared_folder, "host1:2,host2:1,host3:2", 40, PACELINE_ALGORITHM=name)


@pytest.mark.long
def test_collectives_over_racks(hosts, shared_folder):
    """The hosts of a rack are not next to each other in the job."""
    racks = {"PACELINE_RACKS": "host[1,3] host[2,4]", "PACELINE_ALGORITHM": "racks"}
    as_expected(hosts, shared_folder, "host1:2,host2:1,host3:1,host4:2", 40, **racks)


CYCLIC = """
    import os, runpy, sys
    # as srun --distribution=cyclic would place them: host1 has ranks 0 and 2, host2 1 and 3
    rank, per_host = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ["RANK"] = str(rank % per_host * 2 + rank // per_host)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    """


@pytest.mark.long
def test_collectives_with_cyclic_rank_placement(hosts, shared_folder):
    ranks.write(shared_folder, ANY, "any.py")
    words = ["any.py", 7, 40, 3]
    where = "host1:2,host2:2"
    ranks.write(shared_folder, CYCLIC)
    command = [ranks.PACELINE, "run", "--fresh", "-H", where, "script.py", *words]
    done = hosts.run("host0", *command, cwd=shared_folder, timeout=120)
    assert done.stdout.count("all as expected") == 4, done.stdout + done.stderr


@pytest.mark.long
def test_all_reduce_is_bitwise_reproducible(hosts, shared_folder):
    found = []
    for name in ("one", "two"):
        run(hosts, shared_folder, SAME, "host1:2,host2:1,host3:1", shared_folder / name)
        found.append(torch.load(shared_folder / name))
    assert torch.equal(*found)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "uneven", "unused"])
def test_models_train_with_same_result_as_gloo(hosts, shared_folder, kind):
    found = []
    for backend in ("gloo", "paceline"):
        words = [shared_folder / backend, backend, kind]
        run(hosts, shared_folder, TRAINS, "host1:2,host2:2", *words)
        found.append(torch.load(shared_folder / backend))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-5)


GROUPS = """
    import torch, torch.distributed as dist
    import paceline

    dist.init_process_group("paceline")
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([at, at + size // 2]) for at in range(size // 2)]  # over hosts
    mates = [dist.new_group([0, 1]), dist.new_group([2, 3])]                   # in one
    x = torch.full((100_000,), float(rank))
    dist.all_reduce(x, group=mates[rank // 2])
    dist.all_reduce(x, dist.ReduceOp.AVG, group=pairs[rank % 2])
    kinds = {type(one.kernel).__name__ for one in (mates[rank // 2], pairs[rank % 2])}
    print(rank, float(x[0]), float(x[-1]), *sorted(kinds), flush=True)
    dist.destroy_process_group()
    """


@pytest.mark.long
def test_process_groups_within_and_across_hosts(hosts, shared_folder):
    done = run(hosts, shared_folder, GROUPS, "host1:2,host2:2")
    expected = {f"{rank} 3.0 3.0 CKernel HierarchicalKernel" for rank in range(4)}
    assert expected <= ranks.untagged(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize(
    "where", [pytest.param("host1:1,host2:1", marks=pytest.mark.long), "host1:2,host2:2"]
)
def test_mismatched_collectives_and_timeouts_are_reported(hosts, shared_folder, where):
    done = run(hosts, shared_folder, FAILS, where, "size,type,call,sleeps", 1)
    said = {}
    for what, rank, text in re.findall(r"(\w+) after [\d.]+ s rank (\d+): (.*)", done.stdout):
        said.setdefault(what, {})[int(rank)] = text
    has = "rank 0 calls all-reduce of 400,000 bytes as float32 (sum), and rank 1 calls"
    for what, theirs in (
        ("size", "all-reduce of 280,000 bytes as float32 (sum)"),
        ("type", "all-reduce of 400,000 bytes as float64 (sum)"),
        ("call", "broadcast of 400,000 bytes from rank 0"),
    ):
        assert f"{has} {theirs}" in said[what][0]
        assert len(set(said[what].values())) == 1, "ranks say different things"
        again = re.findall(rf"{what} again rank \d: (.*)", done.stdout)
        assert set(again) == set(said[what].values()), "a broken group goes on"
    assert "rank 1" in said["sleeps"][0]
    assert "did not join within 1 s" in said["sleeps"][0]
    assert "HINT: check whether the rank is stopped" in said["sleeps"][0]


@pytest.mark.parametrize(
    "where", ["host1:1,host2:1,host3:1", pytest.param("host1:2,host2:2", marks=pytest.mark.long)]
)
def test_killed_rank_is_reported_on_all_hosts(hosts, shared_folder, where):
    done = run(hosts, shared_folder, FAILS, where, "dies", 30, check=False)
    told = re.findall(r"after ([\d.]+) s rank (\d): (.*)", done.stdout)
    assert told, done.stdout + done.stderr
    for seconds, _, text in told:
        assert (
            "all-reduce of 400,000 bytes as float32 (sum) can't continue: rank 1 has died" in text
        )
        assert float(seconds) < 5
    assert "rank 1 on host" in done.stderr or "rank 1 was killed by SIGKILL" in done.stderr


CUT = """
    import sys
    from datetime import timedelta
    from pathlib import Path
    import torch, torch.distributed as dist
    import paceline

    dist.init_process_group("gloo")
    group = dist.new_group(backend="paceline", timeout=timedelta(seconds=float(sys.argv[1])))
    x = torch.ones(4_000_000)
    try:
        while x[0] < 2:  # until both know
            x[0] = 2 if Path("healed").exists() else 1
            dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
            Path(f"going-{dist.get_rank()}").touch()
        for _ in range(3):
            dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
        print(dist.get_rank(), "went on", float(x.sum()), flush=True)
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: {error}", flush=True)
    import os
    os._exit(0)
    """


def going(hosts, folder, timeout):
    """Start two ranks on two hosts that run collectives all the time."""
    ranks.write(folder, CUT)
    # Started without a launcher, which would notice the link, too.
    env = {"MASTER_ADDR": hosts.address("host1"), "MASTER_PORT": "29511", "WORLD_SIZE": "2"}
    started = [
        hosts.start(
            name,
            *(ranks.BIN / "python", "script.py", timeout),
            cwd=folder,
            env={**env, "RANK": str(at), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        )
        for at, name in enumerate(("host1", "host2"))
    ]
    ranks.wait_until(lambda: (folder / "going-1").exists(), 60)
    return started


@pytest.mark.long
def test_all_reduce_continues_after_short_network_outage(hosts, shared_folder):
    started = going(hosts, shared_folder, 60)
    hosts.link("host2", False)
    time.sleep(3)
    hosts.link("host2", True)
    (shared_folder / "healed").touch()
    said = [one.communicate(timeout=90) for one in started]
    assert [out.split(" ", 1)[1] for out, _ in said] == ["went on 4000001.0\n"] * 2, said


@pytest.mark.long
def test_link_down_is_reported_within_timeout(hosts, shared_folder):
    started = going(hosts, shared_folder, 20)
    hosts.link("host2", False)
    start = time.monotonic()
    said = [one.communicate(timeout=90)[0] for one in started]
    assert time.monotonic() - start < 40
    here, there = hosts.address("host1"), hosts.address("host2")
    assert f"rank 0 received nothing from host2 (eth0 {there}) for 20 s, not even an ack" in said[0]
    assert f"rank 1 received nothing from host1 (eth0 {here}) for 20 s, not even an ack" in said[1]


DIFFERS = """
    import os
    os.environ["PACELINE_ALGORITHM"] = ["ring", "tree"][int(os.environ["RANK"])]
    """


@pytest.mark.long
def test_invalid_or_inconsistent_variables_are_rejected(hosts, shared_folder):
    where = "host1:1,host2:1"
    done = run(hosts, shared_folder, SAME, where, "x", check=False, PACELINE_ALGORITHM="rings")
    assert "PACELINE_ALGORITHM must be one of direct, doubling, halving," in done.stderr
    assert "racks only if PACELINE_RACKS describes racks" in done.stderr
    done = run(hosts, shared_folder, SAME, where, "x", check=False, PACELINE_LINK_MBIT="fast")
    assert "PACELINE_LINK_MBIT must be a number of Mbit/s above 0; this is fast." in done.stderr
    done = run(hosts, shared_folder, SAME, where, "x", check=False, PACELINE_RACKS="host[1,3]")
    assert (
        "PACELINE_RACKS=host[1,3] does not contain host2. HINT: list every node in one"
        in done.stderr
    )
    assert "did not" not in done.stderr, "one rank waits for another"
    differs = DIFFERS.rstrip(" ") + SAME.lstrip("\n")
    done = run(hosts, shared_folder, differs, where, "x", check=False)
    said = (
        "PACELINE_ALGORITHM must be the same on all ranks; it is ring on rank 0 and tree on rank 1"
    )
    assert f"{said}. HINT: paceline run --env PACELINE_ALGORITHM=ring" in done.stderr


SLOWER = """
    import os, socket
    os.environ["PACELINE_LINK_MBIT"] = {"host2": "200"}.get(socket.gethostname(), "1000")
    """


@pytest.mark.long
def test_slow_link_is_reported_once(hosts, shared_folder):
    script = SLOWER.rstrip(" ") + GROUPS.lstrip("\n")
    done = run(hosts, shared_folder, script, "host1:2,host2:2")
    said = "Slow links, in Mbit/s: host2 (eth0) 200; the others have up to 1,000."
    assert done.stderr.count(said) == 1, done.stderr


def test_place_ranks_by_block_and_cyclic_layout():
    blocks = place_ranks(["a", "a", "b", "b"], ["h1", "h1", "h2", "h2"], 3, 9)
    assert (blocks.ranks_by_host, blocks.host_index, blocks.local_rank, blocks.num_rails) == (
        ((0, 1), (2, 3)),
        1,
        1,
        2,
    )
    cyclic = place_ranks(["a", "b", "a", "b", "a"], ["h1", "h2", "h1", "h2", "h1"], 2, 1)
    assert (cyclic.ranks_by_host, cyclic.local_rank, cyclic.num_rails) == (
        ((0, 2, 4), (1, 3)),
        1,
        1,
    )
    assert (blocks.is_uniform, cyclic.is_uniform) == (True, False)
    assert (blocks.num_connected, cyclic.num_connected) == (2, 2)


def test_place_ranks_groups_hosts_by_rack():
    def of(*racks):
        hosts = ["a", "b", "c", "d"]
        found = place_ranks(hosts, hosts, 0, 1, racks)
        return "".join(found.host_names), found.hosts_per_rack

    assert of("x", "y", "x", "y") == ("acbd", 2)
    assert of("x", "y", "y", "y") == ("abcd", 0)  # racks of different sizes
    assert of("x", "", "x", "") == ("acbd", 0)  # the rack of some hosts is unknown
    assert of("x", "x", "x", "x") == ("abcd", 0)
    assert of("w", "x", "y", "z") == ("abcd", 0)
