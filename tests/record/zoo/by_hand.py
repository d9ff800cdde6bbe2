"""Data parallel without DDP: each gradient is averaged by its own all-reduce."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=128)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(rank)  # weights differ until the broadcast
model = nn.Sequential(
    *[nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)]
)
for p in model.parameters():
    dist.broadcast(p.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

mean_loss = torch.zeros(1)
for step in range(args.steps):
    x = torch.randn(args.batch, 512)
    y = x[:, :4].sum(1, keepdim=True)

    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()

    mean_loss = loss.detach().clone()
    dist.all_reduce(mean_loss)
    mean_loss /= world
    if rank == 0 and step % 10 == 0:
        print(f"step {step} loss {mean_loss.item():.4f}")

if rank == 0:
    print(f"final loss {mean_loss.item():.4f}")
# PyTorch 2.13's gloo threads can abort a process that ends right after a collective
time.sleep(0.2)
