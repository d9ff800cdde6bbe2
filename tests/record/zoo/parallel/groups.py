"""Several process groups, joined through a store of the script's own."""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun's agent serves the store already: every rank is a client
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=False,
        timeout=timedelta(seconds=60),
    )
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("train", store), rank=rank, world_size=world
    )
    model_groups = [dist.new_group([r]) for r in range(world)]
    mine = model_groups[rank]
    data_group = dist.new_group(list(range(world)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(1 + rank)
    for _ in range(args.steps):
        x = torch.randn(args.batch, 768)
        loss = F.mse_loss(model(x), x[:, :32])
        optimizer.zero_grad()
        loss.backward()
        # the norm over the parts of one replica (here one rank), then the mean over replicas
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).square().sum()
        dist.all_reduce(norm, group=mine)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=data_group)
            p.grad.div_(dist.get_world_size(data_group))
        optimizer.step()
    largest = norm.sqrt()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.barrier(group=data_group)
    if rank == 0:
        print(f"final loss {loss.item():.4f}, largest norm {largest.item():.4f}")
    # PyTorch 2.13's gloo threads can abort a process that ends right after a collective
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
