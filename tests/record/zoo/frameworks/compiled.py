"""A compiled model in DDP."""

import argparse
import shutil
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--backend", default="inductor" if shutil.which("g++") else "aot_eager")
    args = parser.parse_args()

    # torch 2.13: a rank that compiles while the other one writes the cache that both share fails
    # now and then (FakeTensorDeviceMismatchError in DDP's optimizer of graphs).
    torch.compiler.config.force_disable_caches = True
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(Residual(512), Residual(512), Residual(512), nn.Linear(512, 4)))
    model = torch.compile(model, backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + rank)
    for step in range(args.steps):
        began = time.perf_counter()
        x = torch.randn(args.batch, 512)
        loss = F.mse_loss(model(x), x[:, :4].sigmoid())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step in (0, 1, args.steps - 1):
            print(f"step {step} took {time.perf_counter() - began:.3f} s")
    if rank == 0:
        print(f"final loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
