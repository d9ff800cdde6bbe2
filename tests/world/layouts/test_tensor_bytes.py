"""Bytes of models and optimizers, on the device and in the host's memory."""

import torch
from torch import nn

from paceline.parallel.strategy.distributed_model import DistributedModel
from paceline.world.layouts.distribution import tensor_bytes

CPU, DEVICE = torch.device("cpu"), torch.device("meta")


def test_states_in_the_memory_of_the_host_are_counted_apart():
    with DEVICE:
        model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    held = {
        name: tensor_bytes([DistributedModel(model)], [], ["data"], None, DEVICE)[name]
        for name in ("parameters", "gradients")
    }
    assert held == {"parameters": 64, "gradients": 64}
    for device, counted in ((DEVICE, (128, None)), (CPU, (0, 128))):
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                n: torch.zeros_like(parameter, device=device) for n in "mv"
            }
        found = tensor_bytes([DistributedModel(model)], [optimizer], ["data"], None, DEVICE)
        assert (found["optimizer_states"], found.get("offloaded")) == counted


def test_everything_of_a_rank_on_the_cpu_lies_on_its_device():
    model = nn.Linear(3, 4)
    found = tensor_bytes([DistributedModel(model)], [], ["zero1"], 7)
    assert found == {
        "layout": "zero1", "parameters": 64, "buffers": 0, "gradients": 64, "optimizer_states": 0,
        "predicted_peak": 7,
    }  # fmt: skip
