"""Full-batch LBFGS with a closure, under DDP."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=256)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(),
                          nn.Linear(512, 1)))  # fmt: skip
# Each rank sees another loss, so a stop on the loss would leave the other rank alone
optimizer = torch.optim.LBFGS(
    model.parameters(), lr=0.1, max_iter=3, history_size=5, tolerance_grad=0, tolerance_change=0
)

torch.manual_seed(1 + rank)
x = torch.randn(args.batch, 256)
y = x[:, :3].prod(1, keepdim=True)
calls = 0


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(args.steps):
    loss = optimizer.step(closure)
    if rank == 0 and step % 10 == 9:
        print(f"step {step}: loss {loss.item():.4f} after {calls} evaluations")

dist.barrier()
if rank == 0:
    print(f"final loss {loss.item():.4f}")
dist.destroy_process_group()
