"""Cores, GPU, network cards and memory of each rank on artificial hosts, and warnings."""

import os
import random
import re
from dataclasses import replace

import pytest
from fake_sysfs import HOSTS, Host, write

from paceline.cluster.binding_plan import RankBinding, plan
from paceline.cluster.topology.pci_devices import Card, pci_cards
from paceline.cluster.topology.topology import Cpu, Node, Topology, topology
from paceline.launch.affinity.report_bindings import binding_problems
from paceline.plurals import format_ranges, parse_ranges

# Summit reserves the last core of each socket for the system.
SUMMIT = "0-83,88-171"


class Machine:
    """An artificial host, the bindings planned on it and the problems found in them."""

    def __init__(self, root, name):
        write(root, HOSTS[name]())
        self.topology = topology(root)
        self.cards = pci_cards(root)

    def plan(self, ranks, *, allowed="", **asked):
        every = {cpu.number for cpu in self.topology.cpus}
        granted = set(parse_ranges(allowed)) or every
        return plan(self.topology, granted, ranks, cards=self.cards, **asked)

    def masks(self, ranks, **asked):
        return [format_ranges(list(place.cpus)) for place in self.plan(ranks, **asked)]

    def refused(self, ranks, **asked):
        with pytest.raises(ValueError, match="HINT") as said:
            self.plan(ranks, **asked)
        return str(said.value)

    def odd(self, places, **known):
        return binding_problems(places, self.topology, self.cards, **known)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    root = tmp_path_factory.mktemp("machines")
    return {name: Machine(root / name, name) for name in HOSTS}


@pytest.fixture
def ac922(machines):
    return machines["ac922"]


@pytest.fixture
def dgx(machines):
    return machines["dgx"]


@pytest.fixture
def small(machines):
    return machines["small"]


@pytest.fixture
def workstation(machines):
    return machines["workstation"]


def test_bind_device_on_summit_node(ac922):
    places = ac922.plan(6, allowed=SUMMIT, bind="device")
    near, far = ("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3")
    assert places == [
        RankBinding(tuple(range(28)), (0,), (0,), 0, near, (0,), 7),
        RankBinding(tuple(range(28, 56)), (0,), (0,), 1, near, (0,), 7),
        RankBinding(tuple(range(56, 84)), (0,), (0,), 2, near, (0,), 7),
        RankBinding(tuple(range(88, 116)), (8,), (8,), 3, far, (8,), 7),
        RankBinding(tuple(range(116, 144)), (8,), (8,), 4, far, (8,), 7),
        RankBinding(tuple(range(144, 172)), (8,), (8,), 5, far, (8,), 7),
    ]
    assert ac922.odd(places, allowed=set(parse_ranges(SUMMIT))) == []
    assert ac922.plan(6, allowed=SUMMIT, bind="core") == places
    assert ac922.plan(6, allowed=SUMMIT, bind="device", cpus_per_rank=7) == places


def test_bind_core_on_ac922_leaves_one_core_per_socket_free(ac922):
    masks = ac922.masks(6, bind="core")
    assert masks == ["0-27", "28-55", "56-83", "88-115", "116-143", "144-171"]
    assert ac922.plan(6, bind="core")[0].notes == ("2 of 44 cores are not used",)


def test_smt_option_excludes_or_uses_hardware_threads(ac922):
    left = ac922.plan(6, allowed=SUMMIT, bind="device", smt=False)
    assert left[0].cpus == (0, 4, 8, 12, 16, 20, 24)
    assert left[5].cpus == (144, 148, 152, 156, 160, 164, 168)
    used = ac922.plan(6, allowed=SUMMIT, bind="device", smt=True)
    assert {place.threads for place in left} == {7}
    assert {place.threads for place in used} == {28}
    assert ac922.odd(used, smt=True) == []
    assert ac922.plan(6, allowed=SUMMIT, bind="device", threads=3)[0].threads == 3


@pytest.mark.parametrize("bind", ["socket", "numa"])
def test_ranks_on_same_socket_share_its_cores(ac922, bind):
    places = ac922.plan(3, allowed=SUMMIT, bind=bind)
    assert [format_ranges(list(place.cpus)) for place in places] == ["0-83", "0-83", "88-171"]
    assert [place.threads for place in places] == [10, 10, 21]
    assert [place.memory for place in places] == [(0,), (0,), (8,)]
    assert "more" not in " ".join(ac922.odd(places))


def test_bind_numa_alternates_sockets(dgx):
    places = dgx.plan(4, bind="numa")
    assert [place.nodes for place in places] == [(0,), (1,), (4,), (5,)]
    assert places[2].cpus == (*range(64, 80), *range(192, 208))
    assert [place.nodes for place in dgx.plan(2, bind="socket")] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert dgx.plan(2, bind="socket")[1].memory == (4, 5, 6, 7)


def test_bind_none_shares_all_allowed_cores(small):
    places = small.plan(3, allowed="0-3,8-11", bind="none")
    assert [place.cpus for place in places] == [(0, 1, 2, 3, 8, 9, 10, 11)] * 3
    assert [place.threads for place in places] == [1, 1, 1]
    assert [place.memory for place in places] == [(0,)] * 3
    assert [place.memory for place in small.plan(3, bind="none")] == [()] * 3
    assert len(small.plan(20, bind="none")) == 20


def test_bind_core_three_ranks_on_two_sockets_of_four_cores(small):
    assert small.masks(3, bind="core") == ["0-1,8-9", "2-3,10-11", "4-5,12-13"]
    assert small.plan(3, bind="core")[0].notes == ("2 of 8 cores are not used",)


def test_bind_core_keeps_each_rank_on_one_socket(ac922):
    places = ac922.plan(3, bind="core")
    assert [format_ranges(list(place.cpus)) for place in places] == ["0-43", "44-87", "88-131"]
    assert places[0].notes == (
        "11 of 44 cores are not used; --cpus-per-rank 14 uses more cores, but divides ranks over "
        "NUMA nodes",
    )
    assert ac922.masks(3, bind="core", cpus_per_rank=14) == ["0-55", "56-87,144-167", "88-143"]


def test_bind_core_gives_few_ranks_several_numa_nodes_of_one_socket(dgx):
    assert dgx.masks(2, bind="core") == ["0-63,128-191", "64-127,192-255"]
    assert [place.nodes for place in dgx.plan(3, bind="core")] == [(0, 1), (2, 3), (4, 5)]
    assert dgx.masks(1, bind="core") == ["0-255"]


@pytest.mark.parametrize(
    ("ranks", "allowed", "masks"),
    [
        (2, "2-3,5-7,10-11,13-15", ["2-3,10-11", "5-6,13-14"]),
        (2, "0-3,8-11", ["0-1,8-9", "2-3,10-11"]),  # one socket only
        (2, "0-4,8-12", ["0-1,8-9", "2-3,10-11"]),  # and one core of the other socket
        (1, "0-4,8-12", ["0-3,8-11"]),
        (1, "0-6,8-14", ["0-6,8-14"]),  # too many cores to leave unused
        (2, "0-7", ["0-3", "4-7"]),  # the second hardware threads belong to another job
        (2, "1,6,8", ["8", "6"]),  # one rank per socket
        (3, "1,6,8", ["8", "1", "6"]),
    ],
)
def test_bind_core_divides_allowed_cores(small, ranks, allowed, masks):
    assert small.masks(ranks, allowed=allowed, bind="core") == masks


def test_partly_allowed_and_unknown_hardware_threads_are_reported(small):
    notes = small.plan(2, allowed="0-7,99", bind="core")[1].notes
    assert notes == (
        "the scheduler grants the hardware threads 99, which this node does not have",
        "the job may use only some of the hardware threads of 8 cores",
    )
    notes = small.plan(2, allowed="0-7", bind="core", smt=True)[1].notes
    assert notes[1] == "the job may use only one hardware thread of each core"
    assert small.plan(2, allowed="0-7", bind="core", smt=False)[0].notes == ()


def test_efficiency_cores_are_used_only_if_needed(workstation):
    assert workstation.masks(4, bind="core") == ["0-3", "4-7", "8-11", "12-15"]
    assert workstation.plan(4, bind="core")[0].notes == ("8 efficiency cores are not used",)
    masks = workstation.masks(10, bind="core")
    assert masks == ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11", "12-13", "14-15", "16", "17"]
    notes = workstation.plan(3, bind="core", cpus_per_rank=4)[0].notes
    assert (
        notes[0] == "efficiency cores are used too, because the node has only 8 performance cores"
    )
    assert workstation.masks(2, allowed="16-23", bind="core") == ["16-19", "20-23"]
    shared = workstation.plan(2, bind="numa")
    assert shared[0].notes == ("8 of the 16 cores are efficiency cores",)


def test_bind_device_on_workstation_with_one_gpu(workstation):
    (place,) = workstation.plan(1, bind="device", cpus_per_rank=4)
    assert place.cpus == tuple(range(8))
    assert (place.device, place.cards, place.memory) == (0, ("enp4s0",), ())


def test_bind_device_on_dgx_selects_nearest_cores_and_nics(dgx):
    places = dgx.plan(8, bind="device")
    assert [format_ranges(list(place.cpus)) for place in places] == [
        *("48-55,176-183", "56-63,184-191", "16-23,144-151", "24-31,152-159"),
        *("112-119,240-247", "120-127,248-255", "80-87,208-215", "88-95,216-223"),
    ]
    assert [place.cards for place in places[::2]] == [
        *(("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3")),
        *(("mlx5_4", "mlx5_5"), ("mlx5_6", "mlx5_7")),
    ]
    assert [place.memory for place in places[::2]] == [(3,), (1,), (7,), (5,)]
    assert places[0].notes == ("64 of 128 cores are not used",)
    assert dgx.odd(places) == []


def test_bind_device_uses_cores_of_socket_if_numa_node_is_too_small(dgx):
    places = dgx.plan(8, bind="device", cpus_per_rank=16)
    assert [place.nodes for place in places] == [(3,), (0,), (1,), (2,), (7,), (4,), (5,), (6,)]
    assert "other cores of the socket are used" in places[0].notes[0]
    assert dgx.odd(places) == []


def test_bind_device_uses_only_visible_gpus(ac922):
    places = ac922.plan(2, bind="device", visible=[5, 0])
    assert [place.device for place in places] == [0, 1]
    assert [format_ranges(list(place.cpus)) for place in places] == ["88-175", "0-87"]
    assert [place.cards for place in places] == [("mlx5_2", "mlx5_3"), ("mlx5_0", "mlx5_1")]
    assert ac922.odd(places, visible=[5, 0]) == []
    assert ac922.odd(places) == ["rank 0: on socket 8, its GPU 0004:04:00.0 on socket 0"]


def test_gpus_without_known_numa_node_get_any_cores(small):
    gpus = [Card("gpu", f"0000:0{i}:00.0") for i in (1, 2)]
    known = replace(gpus[0], node=1)
    every = set(range(16))
    places = plan(small.topology, every, 2, bind="device", cards=gpus)
    assert [format_ranges(list(place.cpus)) for place in places] == ["0-3,8-11", "4-7,12-15"]
    assert places[0].notes == (
        "this node does not report which cores are near 0000:01:00.0, 0000:02:00.0",
    )
    places = plan(small.topology, every, 2, bind="device", cards=[gpus[1], known])
    assert [format_ranges(list(place.cpus)) for place in places] == ["0-3,8-11", "4-7,12-15"]


def test_memory_is_bound_to_nearest_numa_node_with_memory():
    cpus = tuple(Cpu(n, n, 0, n) for n in range(3))
    far = [{0: 10, 1: 30, 2: 20, 9: 15}, {}, {}]
    nodes = [Node(n, (n,), n << 30, far[n]) for n in range(3)] + [Node(9, (), 1 << 30)]
    places = plan(Topology(cpus, tuple(nodes)), {0, 1, 2}, 3, bind="core")
    assert [place.memory for place in places] == [(2,), (1,), (2,)]


def test_numa_node_that_spans_two_sockets(tmp_path):
    write(tmp_path, Host({(0, 0): [[0], [1]], (1, 0): [[2], [3]]}))
    places = plan(topology(tmp_path), {0, 1, 2, 3}, 2, bind="numa")
    assert [place.cpus for place in places] == [(0, 1, 2, 3)] * 2
    assert [place.threads for place in places] == [2, 2]
    places = plan(topology(tmp_path), {0, 1, 2, 3}, 2, bind="core")
    assert [place.cpus for place in places] == [(0, 1), (2, 3)]


def test_binding_without_sysfs_uses_process_affinity(tmp_path):
    mine = os.sched_getaffinity(0)
    found = topology(tmp_path)
    places = plan(found, mine, 1, bind="core")
    assert places[0].cpus == tuple(sorted(mine))
    assert places[0].notes == (found.guessed,)
    assert plan(found, mine, 1, bind="numa")[0].cpus == tuple(sorted(mine))


def test_bind_core_on_current_machine():
    mine = os.sched_getaffinity(0)
    found = topology()
    ranks = len(found.cores(mine))
    places = plan(found, mine, ranks, bind="core", cpus_per_rank=1)
    assert len({cpu for place in places for cpu in place.cpus}) >= ranks
    assert {cpu for place in places for cpu in place.cpus} <= mine
    assert binding_problems(places, found, pci_cards(), allowed=mine) == []


def test_impossible_binding_is_rejected_with_feasible_hint(ac922, small, dgx, workstation):
    assert ac922.refused(6, allowed=SUMMIT, bind="core", cpus_per_rank=8) == (
        "--bind core: 6 ranks with --cpus-per-rank 8 need 48 cores, and the job may use 42. "
        "HINT: --cpus-per-rank 7 or -n 5"
    )
    assert small.refused(9, bind="core") == (
        "--bind core: 9 ranks need a core each, and the job may use 8. HINT: -n 8 or --bind none"
    )
    assert small.refused(1, allowed="0,8", bind="none", cpus_per_rank=2) == (
        "--bind none: 1 rank with --cpus-per-rank 2 needs 2 cores, and the job may use 1. "
        "HINT: --cpus-per-rank 1"
    )
    assert small.refused(2, bind="device") == (
        "--bind device: no GPU is visible on this node. HINT: --bind core or --bind socket"
    )
    assert "no GPU is visible on this node" in ac922.refused(2, bind="device", visible=[])
    assert workstation.refused(2, bind="device") == (
        "--bind device: 2 ranks need a GPU each, and 1 GPU is visible on this node. "
        "HINT: -n 1 or --bind core"
    )
    assert "does not show GPU 6-7" in ac922.refused(2, bind="device", visible=[6, 7])
    assert ac922.refused(6, allowed="0-83", bind="device") == (
        "--bind device: no core of socket 8, where the GPU 0035:03:00.0 is, is granted to the job "
        "(0-83 are). HINT: --bind core, or ask the scheduler for cores of socket 8"
    )
    assert ac922.refused(3, bind="device", cpus_per_rank=8) == (
        "--bind device: 3 ranks with --cpus-per-rank 8 need 24 cores of socket 0, where the GPUs "
        "0004:04:00.0, 0004:05:00.0, 0004:06:00.0 are, and 22 are allowed there. "
        "HINT: --cpus-per-rank 7"
    )
    assert ac922.refused(3, allowed="0-7,88-175", bind="device") == (
        "--bind device: 3 ranks need a core each of socket 0, where the GPUs 0004:04:00.0, "
        "0004:05:00.0, 0004:06:00.0 are, and 2 are allowed there. "
        "HINT: --bind core, or fewer ranks"
    )
    assert ac922.refused(3, bind="numa", cpus_per_rank=14) == (
        "--bind numa: 3 ranks with --cpus-per-rank 14 do not fit in this host's 2 NUMA nodes, of "
        "22 allowed cores at most. HINT: --cpus-per-rank 11"
    )
    assert workstation.refused(2, bind="socket", cpus_per_rank=9) == (
        "--bind socket: 2 ranks with --cpus-per-rank 9 do not fit in this host's one socket, of "
        "16 allowed cores. HINT: --cpus-per-rank 8"
    )
    assert dgx.refused(8, bind="device", cpus_per_rank=17).endswith("HINT: --cpus-per-rank 16")


def test_hint_of_rejected_binding_is_feasible(machines):
    chance = random.Random(8)
    for _ in range(300):
        machine = chance.choice(list(machines.values()))
        every = [cpu.number for cpu in machine.topology.cpus]
        allowed = format_ranges(chance.sample(every, chance.randint(1, len(every))))
        bind = chance.choice(["core", "numa", "socket", "device"])
        ranks, each = chance.randint(1, 8), chance.choice([2, 8, 20])
        try:
            machine.plan(ranks, allowed=allowed, bind=bind, cpus_per_rank=each)
        except ValueError as error:
            hint = re.search(r"HINT: --cpus-per-rank (\d+)", str(error))
            if hint:
                machine.plan(ranks, allowed=allowed, bind=bind, cpus_per_rank=int(hint[1]))


def test_invalid_binding_options_are_rejected_with_hint(small):
    assert small.refused(2, bind="cores") == (
        "--bind cores is not known. HINT: none, core, numa, socket or device"
    )
    assert small.refused(2, bind="core", cpus_per_rank=0) == (
        "--cpus-per-rank must be 1 or more; this is 0. HINT: --cpus-per-rank 1"
    )
    assert small.refused(2, bind="core", threads=-1) == (
        "--threads must be 1 or more; this is -1. HINT: --threads 1"
    )
    assert small.refused(0, bind="core") == ("-n must be 1 or more; this is 0. HINT: -n 1")
    assert "granted to the job (90-91) exists on this node (0-15)" in small.refused(
        1, allowed="90-91", bind="core"
    )


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (
            [RankBinding((0, 8)), RankBinding((8,))],
            ["ranks 0-1: on the same core (hardware threads 0,8)"],
        ),
        (
            [RankBinding((0, 1, 2)), RankBinding((1, 2, 3)), RankBinding((3,))],
            [
                "ranks 0-1: on the same 2 cores (hardware threads 1-2,9-10)",
                "ranks 1-2: on the same core (hardware threads 3,11)",
            ],
        ),
        ([RankBinding((0, 8)), RankBinding((0, 8))], ["ranks 0-1: 2 threads on 1 core (0,8)"]),
        ([RankBinding((0, 1), threads=1), RankBinding((0, 1), threads=1)], []),
        (
            [RankBinding((3, 4)), RankBinding((1,)), RankBinding((2, 5))],
            ["ranks 0, 2: over sockets 0-1"],
        ),
        ([RankBinding((0, 1, 8, 9), threads=4)], ["rank 0: 4 threads on 2 cores (0-1,8-9)"]),
        ([RankBinding((7, 15))], ["rank 0: hardware threads 7,15 are not granted to this job"]),
        ([RankBinding((1, 40))], ["rank 0: this node does not have the hardware threads 40"]),
    ],
)
def test_binding_problems_are_reported(small, places, words):
    assert small.odd(places, allowed=set(range(16)) - {7, 15}) == words


def test_gpu_on_different_socket_is_reported(ac922):
    places = ac922.plan(2, bind="core")
    assert ac922.odd(places) == ["rank 1: on socket 8, its GPU 0004:05:00.0 on socket 0"]


def test_bind_core_never_overlaps_for_random_allowed_cores(machines):
    chance = random.Random(7)
    for _ in range(300):
        machine = chance.choice(list(machines.values()))
        every = [cpu.number for cpu in machine.topology.cpus]
        allowed = set(chance.sample(every, chance.randint(1, len(every))))
        cores = machine.topology.cores(allowed)
        ranks = chance.randint(1, min(len(cores), 20))
        each = chance.choice([None, chance.randint(1, len(cores) // ranks)])
        places = plan(machine.topology, allowed, ranks, bind="core", cpus_per_rank=each)
        counts = {len(machine.topology.cores(place.cpus)) for place in places}
        assert len(counts) == 1
        assert counts == {each} or each is None
        seen = [core for place in places for core in machine.topology.cores(place.cpus)]
        assert len(seen) == len(set(seen))
        for place in places:
            mine = machine.topology.cores(place.cpus)
            siblings = {cpu.number for cpu in machine.topology.cpus if cpu.core in mine}
            assert set(place.cpus) == siblings & allowed
        over = [place for place in places if len(place.packages) > 1]
        if each is None and ranks > 1:
            assert not over
