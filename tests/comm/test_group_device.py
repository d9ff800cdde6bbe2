"""Numbers of the host, and collectives of GPUs, in groups of either."""

from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from paceline.comm import backend
from paceline.comm.group_device import exchangeable
from paceline.comm.shared_memory_group import SharedMemoryGroup


def test_numbers_go_to_a_device_of_the_group():
    numbers = torch.ones(2)
    of_both = SimpleNamespace(_device_types=[torch.device("meta"), torch.device("cpu")])
    assert exchangeable(numbers, of_both) is numbers
    of_gpus = SimpleNamespace(_device_types=[torch.device("meta")])
    assert exchangeable(numbers, of_gpus).device.type == "meta"


def test_tensors_of_the_host_are_in_shared_memory_on_nodes_with_gpus(monkeypatch):
    """All ranks decide alike then, also where only some nodes have GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "over_memory", lambda group, *_: (f"{group} in memory", ""))
    options = SimpleNamespace(
        store=dist.HashStore(), timeout=timedelta(seconds=1), global_ranks_in_group=[0]
    )
    assert backend._faster("group", options) == "group in memory"


def test_barrier_of_a_gpu_is_nccls():
    group = SimpleNamespace(
        inner=SimpleNamespace(barrier=lambda options: "of NCCL"), _start=lambda *_: "in memory"
    )
    options = dist.BarrierOptions()
    options.device = torch.device("cuda")
    assert SharedMemoryGroup.barrier(group, options) == "of NCCL"
    options.device = torch.device("cpu")
    assert SharedMemoryGroup.barrier(group, options) == "in memory"
