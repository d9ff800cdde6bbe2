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


def test_tf_config_lists_every_rank_as_worker():
    config = json.loads(variables(UNEVEN, 3, 30000, {})["TF_CONFIG"])
    workers = ["10.0.0.1:20000", "10.0.0.1:20001", "10.0.0.1:20002"]
    assert config == {
        "cluster": {"worker": [*workers, "10.0.0.2:20003", "10.0.0.2:20004"]},
        "task": {"type": "worker", "index": 3},
    }


def test_jax_coordinator_listens_only_on_address_of_rank_0():
    made = variables(UNEVEN, 4, 30000, {})
    assert {name: value for name, value in made.items() if name.startswith("JAX")} == {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:30000",
        "JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.1:30000",
        "JAX_NUM_PROCESSES": "5",
        "JAX_PROCESS_ID": "4",
    }


def test_jax_coordinator_does_not_bind_to_host_name():
    made = variables(seats("node1", "node2"), 0, 30000, {})
    assert made["JAX_COORDINATOR_ADDRESS"] == "node1:30000"
    assert "JAX_COORDINATOR_BIND_ADDRESS" not in made


@pytest.mark.parametrize(
    ("rank", "local", "cross"),
    [(0, (0, 3), (0, 2)), (2, (2, 3), (0, 1)), (3, (0, 2), (1, 2)), (4, (1, 2), (1, 2))],
)
def test_horovod_cross_ranks_share_local_rank(rank, local, cross):
    made = variables(UNEVEN, rank, 30000, {}, horovod=True)
    assert (made["HOROVOD_RANK"], made["HOROVOD_SIZE"]) == (str(rank), "5")
    assert (int(made["HOROVOD_LOCAL_RANK"]), int(made["HOROVOD_LOCAL_SIZE"])) == local
    assert (int(made["HOROVOD_CROSS_RANK"]), int(made["HOROVOD_CROSS_SIZE"])) == cross
    assert made["HOROVOD_HOSTNAME"] == ("10.0.0.1" if rank < 3 else "10.0.0.2")


def test_horovod_variables_are_only_for_scripts_that_use_it():
    assert not [name for name in variables(UNEVEN, 1, 30000, {}) if name.startswith("HOROVOD")]
    outer = {**variables(UNEVEN, 1, 30000, {}, horovod=True), "PACELINE_STATUS": "123:7"}
    assert variables(seats("127.0.0.1"), 0, 40000, outer)["HOROVOD_SIZE"] == "1"


def test_ipv6_addresses_are_in_brackets():
    made = variables(seats("fd00::1", "fd00::2"), 0, 30000, {})
    assert made["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:30000"
    assert "[fd00::2]:20001" in made["TF_CONFIG"]


def test_variables_set_by_user_are_kept():
    mine = {"TF_CONFIG": "{}", "JAX_COORDINATOR_ADDRESS": "10.1.0.1:5000"}
    made = variables(UNEVEN, 1, 30000, mine)
    assert not {"TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"} & set(made)
    assert made["JAX_PROCESS_ID"] == "1"


def test_nested_run_does_not_inherit_variables_of_outer_run():
    outer = variables(UNEVEN, 1, 30000, {}) | {"PACELINE_STATUS": "123:7"}
    alone = seats("127.0.0.1")
    assert variables(alone, 0, 40000, outer) == variables(alone, 0, 40000, {})


def test_too_long_tf_config_is_omitted():
    many = [Worker(rank // 8, rank % 8, f"10.0.10.{rank // 8}", 20000) for rank in range(8000)]
    made = variables(many, 7999, 30000, {})
    assert "TF_CONFIG" not in made
    assert made["JAX_NUM_PROCESSES"] == "8000"


def test_free_ports_are_distinct_and_outside_ephemeral_range():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        low, high = map(int, file.read().split())
    ports = free_ports(200)
    assert len(set(ports)) == 200
    assert low - framework_variables.FIRST_PORT < 200 or not [p for p in ports if low <= p <= high]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[0]))


def test_port_in_use_on_one_address_is_not_free(monkeypatch):
    monkeypatch.setattr(framework_variables, "FIRST_PORT", 65500)
    (port,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", port))
        assert port not in free_ports(30)


def test_too_few_free_ports_is_an_error_with_count(monkeypatch):
    monkeypatch.setattr(framework_variables, "FIRST_PORT", 65530)
    with pytest.raises(ValueError, match=r"7 free ports are needed on .* HINT"):
        free_ports(7)
