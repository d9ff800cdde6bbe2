"""LARS and LAMB train in each layout like one process: the norm is that of the whole layer."""

from dataclasses import replace

import pytest
import thread_ranks
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from paceline import Layout
from paceline.optim import LAMB, LARS

RULES = {"0": "channels", "2": "row"}
LAYOUTS = {
    "tp2": 2,
    "dp2 x tp2": 4,
    "dp2 x zero1 x tp2": 4,
    "dp2 x zero3 x tp2": 4,
    "pp2": 2,
    "pp2 x zero1": 4,
    "pp2 x tp2": 4,
    "h2": 2,
}
OPTIMIZERS = {
    "lars": lambda groups: LARS(groups, 1.0, weight_decay=0.05, trust_coefficient=0.05),
    "lamb": lambda groups: LAMB(groups, 0.05, weight_decay=0.05),
}


def train(world, layout, name):
    """Return the mean loss of each step; parts of vectors are scaled, too."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
    ).double()
    first, others = [*model[0].parameters()], [*model[2:].parameters()]
    optimizer = OPTIMIZERS[name]([{"params": first, "adapt": True}, {"params": others}])
    model, optimizer = world.distribute(model, optimizer, layout=layout)
    x = torch.randn(16, 1, 4, 6, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 3, (16, 4, 6)))
    losses = []
    for images, labels in world.batches(world.shard(DataLoader(data), global_batch=4)):
        loss = world.forward_backward(model, images, labels, loss=functional.cross_entropy)
        world.step(optimizer)
        losses.append(world.mean(loss * len(images), len(images)))
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_of_layers_are_those_of_one_process(layout, name):
    expected = thread_ranks.alone(lambda world: train(world, "data", name))
    chosen = Layout.parse(layout)
    if chosen.tp != 1:
        chosen = replace(chosen, rules=RULES)
    for found in thread_ranks.run(lambda world: train(world, chosen, name), LAYOUTS[layout]):
        assert found == pytest.approx(expected, rel=1e-6)  # a pipeline returns float32
    assert expected[-1] != pytest.approx(expected[0], rel=1e-2)
