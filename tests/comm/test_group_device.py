"""Numbers of the host in groups that have no backend for the CPU."""

from types import SimpleNamespace

import torch

from paceline.comm.group_device import exchangeable


def test_numbers_go_to_a_device_of_the_group():
    numbers = torch.ones(2)
    of_both = SimpleNamespace(_device_types=[torch.device("meta"), torch.device("cpu")])
    assert exchangeable(numbers, of_both) is numbers
    of_gpus = SimpleNamespace(_device_types=[torch.device("meta")])
    assert exchangeable(numbers, of_gpus).device.type == "meta"
