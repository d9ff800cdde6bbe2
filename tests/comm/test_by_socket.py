"""Reduction within each CPU socket first, for ranks on several sockets.

Cores of this machine represent sockets: the same data is read, but the distances differ.
"""

import json
import os
import re

import pytest
import ranks
import torch
from collectives import ANY, FAILS, SAME

CORES = sorted(os.sched_getaffinity(0))[:2]
SOCKETS = {"PACELINE_SOCKETS": " ".join(map(str, CORES))}
BY_SOCKET = SOCKETS | {"PACELINE_ALGORITHM": "sockets"}
BOUND = f"""
    import os
    os.sched_setaffinity(0, [{CORES}[int(os.environ["PLACES"][int(os.environ["RANK"])])]])
    """

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def bound(text):
    """Return a script whose ranks are bound: digit i of PLACES is the index of rank i's core."""
    return BOUND.rstrip(" ") + text.removeprefix("\n")


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "places", ["0101", *(pytest.param(one, marks=LONG) for one in ("00010", "00110101"))]
)
def test_all_collectives_match_expected_results_by_socket(tmp_path, places):
    check = "    assert dist.group.WORLD.kernel.sockets == 2\n    draw ="
    script = ranks.write(tmp_path, bound(ANY.replace("    draw =", check, 1)))
    done = ranks.run(script, 7, 60, 2, ranks=len(places), PLACES=places, **BY_SOCKET)
    assert done.stdout.count("all as expected") == len(places)


def test_all_reduce_by_socket_is_bitwise_reproducible(tmp_path):
    script, found = ranks.write(tmp_path, bound(SAME)), []
    for name, env in (("one", BY_SOCKET), ("two", BY_SOCKET), ("flat", SOCKETS)):
        ranks.run(script, tmp_path / name, ranks=3, PLACES="011", **env)
        found.append(torch.load(tmp_path / name))
    one, two, flat = found
    assert torch.equal(one, two)
    assert not torch.equal(one, flat)  # without sockets, ranks are summed in rank order
    torch.testing.assert_close(one, flat)


UNEVEN = "host1:3,host2:1,host3:2"


@pytest.mark.long
@pytest.mark.parametrize("where", [UNEVEN, "host1:4,host2:4"])
def test_collectives_by_socket_between_hosts(hosts, shared_folder, where):
    ranks.write(shared_folder, bound(ANY))
    given = BY_SOCKET | {"PLACES": "01101011"}
    more = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
    command = [ranks.PACELINE, "run", "-H", where, *more, "script.py", 3, 40, 5]
    done = hosts.run("host0", *command, cwd=shared_folder, timeout=120)
    assert done.stdout.count("all as expected") == sum(int(one[-1]) for one in where.split(","))


@pytest.mark.parametrize("places", [pytest.param("010", marks=LONG), "001"])
def test_mismatch_timeout_and_killed_rank_are_reported_by_socket(tmp_path, places):
    script = ranks.write(tmp_path, bound(FAILS))
    more = {"PLACES": places, **BY_SOCKET}
    done = ranks.run(script, "size,sleeps,dies", 1, ranks=3, check=False, **more)
    for rank in (0, 2):
        said = dict(re.findall(rf"(\w+) after [\d.]+ s rank {rank}: (.*)", done.stdout))
        assert "rank 1 calls all-reduce of 280,000 bytes as float32 (sum)" in said["size"]
        assert (
            "rank 1 did not join within 1 s. HINT: check whether the rank is stopped"
            in said["sleeps"]
        )
        assert "can't continue: rank 1 has died" in said["dies"]


ONE = """
    import os
    import torch, torch.distributed as dist
    import paceline

    if os.environ["RANK"] in os.environ.get("WITHOUT", ""):
        del os.environ["PACELINE_ALGORITHM"]
    dist.init_process_group("paceline")
    x = torch.ones(100_000)
    dist.all_reduce(x)
    print(dist.get_rank(), float(x.max()), flush=True)
    dist.destroy_process_group()
    """


@pytest.mark.parametrize("places", ["000", pytest.param("01", marks=LONG)])
def test_sockets_algorithm_without_effect_is_reported(tmp_path, places):
    script = ranks.write(tmp_path, bound(ONE))
    size = len(places)
    done = ranks.run(script, ranks=size, PLACES=places, **BY_SOCKET)
    assert ranks.untagged(done.stdout) == {f"{rank} {size}.0" for rank in range(size)}
    assert done.stderr.count("paceline: PACELINE_ALGORITHM=sockets has no effect, because the") == 1


def test_inconsistent_socket_settings_are_rejected(tmp_path):
    script = ranks.write(tmp_path, bound(ONE))
    more = {"PLACES": "0101", "WITHOUT": "23", **BY_SOCKET}
    done = ranks.run(script, ranks=4, check=False, **more)
    assert (
        "PACELINE_ALGORITHM=sockets is set on some ranks of a node only. HINT: set" in done.stderr
    )
    done = ranks.run(script, ranks=4, check=False, **more | {"PACELINE_SOCKETS": "0-x"})
    assert (
        "PACELINE_SOCKETS=0-x is not a list of hardware threads. HINT: give a list for each"
        in done.stderr
    )


TUNED = """
    import torch, torch.distributed as dist
    import paceline
    from paceline.comm.tune.algorithms import ExchangeMethods

    dist.init_process_group("paceline")
    ways = ExchangeMethods(dist.group.WORLD)
    took = ways.measured(1 << 20, torch.device("cpu"))
    assert list(took) == ways.all and all(min(one.values()) > 0 for one in took.values())
    torch.manual_seed(dist.get_rank())
    x, found = torch.randn(100_003), []
    for way in ("paceline", "sockets", "paceline"):
        ways.set(way)
        found.append(x.clone())
        dist.all_reduce(found[-1])
    one, by_socket, again = found
    alike = torch.allclose(one, by_socket, atol=1e-5)
    same = torch.equal(one, again), torch.equal(one, by_socket), alike
    print(dist.get_rank(), *ways.all, *same, flush=True)
    dist.destroy_process_group()
    """


def test_tuner_tries_sockets_algorithm_if_ranks_span_sockets(tmp_path):
    script = ranks.write(tmp_path, bound(TUNED))
    done = ranks.run(script, ranks=4, PLACES="0011", **SOCKETS)
    expected = "paceline sockets gloo True False True"
    assert ranks.untagged(done.stdout) == {f"{rank} {expected}" for rank in range(4)}
    done = ranks.run(script, ranks=4, PLACES="0000", **SOCKETS)
    expected = "paceline gloo True True True"
    assert ranks.untagged(done.stdout) == {f"{rank} {expected}" for rank in range(4)}


BENCH = """
    from paceline.study.probe import bench_comm as comm

    comm.send_to_launcher = lambda **_: False
    comm.main()
    """


@pytest.mark.long
def test_bench_comm_measures_sockets_algorithm(tmp_path):
    """Measure as ``paceline bench comm`` does when ranks are bound to cores of several sockets."""
    script = ranks.write(tmp_path, bound(BENCH))
    done = ranks.run(script, "--sizes", 1024, 1 << 20, ranks=4, PLACES="0011", **SOCKETS)
    told = json.loads(done.stdout[done.stdout.index("{") :])["collectives"]
    assert [one["backend"] for one in told] == ["gloo", "paceline", "paceline by sockets"]
    assert all(one["sizes"][1]["seconds"]["median"] > 0 for one in told)
