"""Environment variables that ``paceline run`` sets for other frameworks, as they document them."""

import json
import socket

import pytest

from paceline.launch.ranks import framework_variables
from paceline.launch.ranks.framework_variables import Worker, free_ports, variables


def seats(*addresses):
    """Return one worker per address, in rank order; equal addresses are the same host."""
    hosts = list(dict.fromkeys(addresses))
    return [
        Worker(hosts.index(address), addresses[:rank].count(address), address, 20000 + rank)
        for rank, address in enumerate(addresses)
    ]


UNEVEN = seats("10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2")


def test_every_rank_is_a_worker_of_tensorflows():
    config = json.loads(variables(UNEVEN, 3, 30000, {})["TF_CONFIG"])
    workers = ["10.0.0.1:20000", "10.0.0.1:20001", "10.0.0.1:20002"]
    assert config == {
        "cluster": {"worker": [*workers, "10.0.0.2:20003", "10.0.0.2:20004"]},
        "task": {"type": "worker", "index": 3},
    }


def test_jax_meets_on_the_first_ranks_host_and_listens_nowhere_else():
    made = variables(UNEVEN, 4, 30000, {})
    assert {name: value for name, value in made.items() if name.startswith("JAX")} == {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:30000",
        "JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.1:30000",
        "JAX_NUM_PROCESSES": "5",
        "JAX_PROCESS_ID": "4",
    }


def test_a_hosts_name_is_not_listened_on_as_it_may_mean_loopback_there():
    made = variables(seats("node1", "node2"), 0, 30000, {})
    assert made["JAX_COORDINATOR_ADDRESS"] == "node1:30000"
    assert "JAX_COORDINATOR_BIND_ADDRESS" not in made


@pytest.mark.parametrize(
    ("rank", "local", "cross"),
    [(0, (0, 3), (0, 2)), (2, (2, 3), (0, 1)), (3, (0, 2), (1, 2)), (4, (1, 2), (1, 2))],
)
def test_horovods_cross_ranks_are_those_with_the_same_local_rank(rank, local, cross):
    made = variables(UNEVEN, rank, 30000, {})
    assert (made["HOROVOD_RANK"], made["HOROVOD_SIZE"]) == (str(rank), "5")
    assert (int(made["HOROVOD_LOCAL_RANK"]), int(made["HOROVOD_LOCAL_SIZE"])) == local
    assert (int(made["HOROVOD_CROSS_RANK"]), int(made["HOROVOD_CROSS_SIZE"])) == cross
    assert made["HOROVOD_HOSTNAME"] == ("10.0.0.1" if rank < 3 else "10.0.0.2")


def test_addresses_of_ip_version_6_are_bracketed():
    made = variables(seats("fd00::1", "fd00::2"), 0, 30000, {})
    assert made["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:30000"
    assert "[fd00::2]:20001" in made["TF_CONFIG"]


def test_what_the_user_has_set_is_kept():
    mine = {"TF_CONFIG": "{}", "JAX_COORDINATOR_ADDRESS": "10.1.0.1:5000"}
    made = variables(UNEVEN, 1, 30000, mine)
    assert not {"TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"} & set(made)
    assert made["JAX_PROCESS_ID"] == "1"


def test_a_run_inside_a_rank_does_not_keep_what_describes_the_outer_run():
    outer = variables(UNEVEN, 1, 30000, {}) | {"PACELINE_STATUS": "123:7"}
    alone = seats("127.0.0.1")
    assert variables(alone, 0, 40000, outer) == variables(alone, 0, 40000, {})


def test_a_list_of_workers_that_no_program_could_be_started_with_is_left_out():
    many = [Worker(rank // 8, rank % 8, f"10.0.10.{rank // 8}", 20000) for rank in range(8000)]
    made = variables(many, 7999, 30000, {})
    assert "TF_CONFIG" not in made
    assert made["JAX_NUM_PROCESSES"] == "8000"


def test_free_ports_are_different_and_none_that_the_kernel_gives_to_anybody():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        low, high = map(int, file.read().split())
    ports = free_ports(200)
    assert len(set(ports)) == 200
    assert low - framework_variables.FIRST_PORT < 200 or not [p for p in ports if low <= p <= high]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[0]))


def test_a_port_that_is_taken_on_one_address_only_is_not_free(monkeypatch):
    monkeypatch.setattr(framework_variables, "FIRST_PORT", 65500)
    (port,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", port))
        assert port not in free_ports(30)


def test_too_few_free_ports_are_an_error_that_says_how_many(monkeypatch):
    monkeypatch.setattr(framework_variables, "FIRST_PORT", 65530)
    with pytest.raises(ValueError, match=r"7 free ports are needed on .* HINT"):
        free_ports(7)
