"""Which GPU a rank takes, and how it leaves a group of NCCL. torch.cuda is replaced."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.world import process_group
from paceline.world.process_group import check_own_gpu, leave_process_group, select_device


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that sets the number of visible GPUs; it returns the selected ones."""

    def show(count):
        selected = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", selected.append)
        return selected

    return show


def test_rank_takes_the_gpu_of_its_local_rank(gpus):
    selected = gpus(4)
    assert select_device(2, None) == torch.device("cuda", 2)
    assert select_device(2, "cuda") == torch.device("cuda", 2)
    assert select_device(2, "cuda:1") == torch.device("cuda", 1)
    assert selected == [2, 2, 1]  # the current device is the rank's, also if the script names it
    assert select_device(2, "cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"no GPU for local rank 4, because .* has 4 GPUs"):
        select_device(4, None)
    with pytest.raises(ValueError, match=r"device='cuda:7' does not exist, because .* has 4 GPUs"):
        select_device(0, "cuda:7")


def test_rank_that_sees_only_its_own_gpu_takes_it(gpus):
    selected = gpus(1)
    assert select_device(3, None) == torch.device("cuda", 0)
    assert selected == [0]
    gpus(0)
    assert select_device(3, None) == torch.device("cpu")
    with pytest.raises(ValueError, match="device='cuda:0' needs a GPU"):
        select_device(3, "cuda:0")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_second_rank_of_a_gpu_is_refused_where_nccl_would_refuse_it(gpus, monkeypatch, backend):
    gpus(1)
    properties = {"cuda:0": SimpleNamespace(uuid="one"), "cuda:1": SimpleNamespace(uuid="two")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: properties[str(one)])
    monkeypatch.setattr(process_group, "uses_nccl", lambda group: backend == "nccl")
    store = dist.HashStore()
    check_own_gpu(torch.device("cuda:0"), 0, store)
    check_own_gpu(torch.device("cuda:1"), 1, store)
    if backend == "gloo":
        check_own_gpu(torch.device("cuda:0"), 2, store)
        return
    with pytest.raises(ValueError, match="local rank 2 has the same GPU as another rank"):
        check_own_gpu(torch.device("cuda:0"), 2, store)


@pytest.mark.parametrize("failed", [False, True])
def test_group_of_nccl_is_aborted_after_a_failure(monkeypatch, failed):
    """To destroy it would wait for collectives that other ranks never enter."""
    left = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group, "uses_nccl", lambda group: True)
    monkeypatch.setattr(process_group, "patch_destroy_process_group", lambda module: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append("destroyed"))
    aborted = lambda: left.append("aborted")  # noqa: E731
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", aborted)
    leave_process_group(failed)
    assert left == ["aborted" if failed else "destroyed"]
