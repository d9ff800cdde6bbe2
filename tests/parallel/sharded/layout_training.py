"""A training that tests run in each layout, on processes and on threads."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, TensorDataset

from paceline.optim import LAMB, LARS

generator = torch.Generator().manual_seed(1)
X = torch.randn(43, 6, 8, generator=generator)
Y = (X[:, 0, :2].sum(1) > 0).long()


class Transformer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
            for _ in range(2)
        )
        self.last = nn.Linear(16, 2)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.last = nn.Linear(12, 2)

    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])


def convolutional(_):
    def stage(a, b):
        return nn.Sequential(nn.Conv1d(a, b, 3, padding=1), nn.ReLU())

    return nn.Sequential(stage(6, 7), stage(7, 7), nn.Flatten(), nn.Linear(56, 2))


MODELS = {"transformer": Transformer, "lstm": Recurrent, "cnn": convolutional}
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "lars": lambda p: LARS(p, lr=1.0, weight_decay=0.01, trust_coefficient=0.02),
    "lamb": lambda p: LAMB(p, lr=1e-2, eps=1e-4, weight_decay=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
}


def train(world, layout, kind, name, dropout=0.0):
    """Return losses, the model's state and the random states of all ranks."""
    loader = world.shard(DataLoader(TensorDataset(X, Y), shuffle=True), global_batch=12)
    validation = world.shard(
        DataLoader(TensorDataset(X[:13], Y[:13]), batch_size=3), every_sample_once=True
    )
    torch.manual_seed(world.rank)  # rank 0's parameters count
    model = MODELS[kind](dropout)
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    accumulate = 1 if name == "momentum" else 2
    model, same = world.distribute(model, optimizer, accumulate=accumulate, layout=layout)
    assert same is optimizer
    losses = []
    for _ in world.epochs(2):
        for images, labels in world.batches(loader):
            loss = F.cross_entropy(model(images), labels)
            world.backward(loss)
            world.step(optimizer, clip=None if name == "fused" else 0.2)
            losses.append(world.mean(loss * len(labels), len(labels)))
        scheduler.step()
        score = world.meter()
        for images, labels in world.batches(validation):
            score.add(
                sum=F.cross_entropy(model(images), labels, reduction="sum"), count=len(labels)
            )
        assert score.sum("count") == (13,)
        losses.append(score.ratio("sum", "count"))
    if layout != "data" and world.size > 1:
        states = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
        held = sum(t.to_local().numel() for t in states)
        assert held <= sum(t.numel() for t in states) / world.size + 100 * len(states)
    drawn = world._collectives.gather(torch.get_rng_state().tolist(), list[int])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(getattr(model, "module", model), options=options)
    return losses, state, drawn
