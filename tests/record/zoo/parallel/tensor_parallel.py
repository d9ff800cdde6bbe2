"""Feed-forward blocks split over the ranks by columns and rows."""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(512, 1024), FeedForward(512, 1024))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    loss = None
    for step in range(args.steps):
        x = torch.randn(args.batch, 512)  # one seed: every rank draws the same batch
        loss = F.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9 and mesh.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if mesh.get_rank() == 0:
        print(f"final loss {loss.item():.4f}")
    # PyTorch 2.13's gloo threads can abort a process that ends right after a collective
    time.sleep(0.2)


if __name__ == "__main__":
    main()
