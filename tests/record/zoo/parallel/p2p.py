"""A domain cut in strips: each step swaps edges around the ring, then trains."""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LEFT, RIGHT = 1, 2  # tags: the way an edge travels


def swap_edges(strip, edge, rank, world):
    before, after = (rank - 1) % world, (rank + 1) % world
    from_before = torch.empty(len(strip), edge)
    from_after = torch.empty(len(strip), edge)
    requests = [
        dist.isend(strip[:, :edge].contiguous(), before, tag=LEFT),
        dist.isend(strip[:, -edge:].contiguous(), after, tag=RIGHT),
        dist.irecv(from_after, after, tag=LEFT),
        dist.irecv(from_before, before, tag=RIGHT),
    ]
    for request in requests:
        request.wait()
    return torch.cat([from_before, strip, from_after], dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--edge", type=int, default=32)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512 + 2 * args.edge, 768), nn.ReLU(), nn.Linear(768, 512))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + rank)
    for _ in range(args.steps):
        strip = torch.randn(args.batch, 512)
        padded = swap_edges(strip, args.edge, rank, world)
        target = 0.5 * (padded[:, args.edge - 1 : -args.edge - 1] + padded[:, args.edge :][:, :512])
        loss = F.mse_loss(model(padded), target)
        optimizer.zero_grad()
        loss.backward()
        swap_edges(loss.detach().expand(1, 2), 1, rank, world)  # the neighbours' losses
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        offset = 0
        for p in model.parameters():
            p.grad = flat[offset : offset + p.numel()].view_as(p) / world
            offset += p.numel()
        optimizer.step()
    if rank == 0:
        print(f"final loss {loss.item():.4f}")
    # PyTorch 2.13's gloo threads can abort a process that ends right after a collective
    time.sleep(0.2)


if __name__ == "__main__":
    main()
