"""DDP over a python list of batches, or over a slow generator of them."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def make_batch(size):
    x = torch.randn(size, 512)
    return x, (x**2).mean(1, keepdim=True)


def generate(steps, size, seconds):
    for _ in range(steps):
        time.sleep(seconds)
        yield make_batch(size)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--generator", type=float, metavar="SECONDS", help="sleep before each batch")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
if args.generator is None:
    batches = [make_batch(args.batch) for _ in range(args.steps)]
else:
    batches = generate(args.steps, args.batch, args.generator)

model = DDP(
    nn.Sequential(
        *[nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)]
    )
)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
criterion = nn.SmoothL1Loss()

loss = None
for x, y in batches:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()

if rank == 0:
    print(f"final loss {loss.item():.4f}")
