"""A regression with paceline's world: uneven batches, exact validation, EMA by hand."""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, (x[:, :3].sum(1).tanh() + 0.3 * x[:, 3]).unsqueeze(1))


parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=16)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

world = paceline.init()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
ema = copy.deepcopy(model).requires_grad_(False)
model, optimizer = world.distribute(model, optimizer)
train = world.shard(DataLoader(rows(230, 0), shuffle=True), global_batch=args.global_batch)
valid = world.shard(DataLoader(rows(77, 1), batch_size=16), every_sample_once=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

for _epoch in world.epochs(args.epochs):
    for x, y in world.batches(train):
        loss = nn.functional.mse_loss(model(x), y)
        world.backward(loss)
        world.step(optimizer, clip=1.0)
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    scheduler.step()
    score = world.meter()
    with torch.no_grad():
        for x, y in world.batches(valid):
            score.add(squares=((ema(x) - y) ** 2).sum(), count=len(y))
    world.log(valid=score.ratio("squares", "count"))
