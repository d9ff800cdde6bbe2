"""DDP started by plain python: this script makes its own ranks."""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(rank, world, args):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + rank)
    loss = None
    for _ in range(args.steps):
        x = torch.randn(args.batch, 768)
        loss = F.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"final loss {loss.item():.4f}")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--how", choices=["spawn", "process"], default="spawn")
    args = parser.parse_args()

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(free_port())
    if args.how == "spawn":
        mp.spawn(train, args=(args.ranks, args), nprocs=args.ranks)
    else:
        mp.set_start_method("spawn")
        processes = []
        for rank in range(args.ranks):
            p = mp.Process(target=train, args=(rank, args.ranks, args))
            p.start()
            processes.append(p)
        for p in processes:
            p.join()
        if any(p.exitcode for p in processes):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
