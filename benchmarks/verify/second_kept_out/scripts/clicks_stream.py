#!/usr/bin/env python3
"""Click prediction by a factorization machine; the log of clicks is a stream read by workers.

A step's batch is divided over the ranks, steps are divided over the workers of a rank: whatever the
number of ranks and workers is, each step trains on the same clicks. A run goes on at the step where
its last checkpoint was written.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

N_USERS, N_ITEMS, N_TRAIN, N_TEST = 50, 40, 480, 90


def click(number):
    g = torch.Generator().manual_seed(7919 * number + 5)
    user = torch.randint(N_USERS, (), generator=g)
    item = torch.randint(N_ITEMS, (), generator=g)
    chance = 0.9 if (user + item) % 3 == 0 else 0.15
    clicked = (torch.rand((), generator=g) < chance).float()
    return torch.stack([user, N_USERS + item]), clicked


class ClickLog(IterableDataset):
    def __init__(self, rank, world_size, batch_size):
        super().__init__()
        self.rank, self.world_size, self.batch_size = rank, world_size, batch_size
        self.epoch = self.first_step = 0

    def steps(self):
        return N_TRAIN // (self.batch_size * self.world_size)

    def __iter__(self):
        worker = get_worker_info()
        worker_id, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        order = torch.randperm(N_TRAIN, generator=torch.Generator().manual_seed(self.epoch))
        for step in range(self.first_step + worker_id, self.steps(), workers):
            start = (step * self.world_size + self.rank) * self.batch_size
            for number in order[start : start + self.batch_size].tolist():
                yield click(number)


class FactorizationMachine(nn.Module):
    def __init__(self, factors=8):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.linear = nn.Embedding(N_USERS + N_ITEMS, 1)
        self.factors = nn.Embedding(N_USERS + N_ITEMS, factors)
        nn.init.normal_(self.factors.weight, std=0.3)

    def forward(self, features):
        pairs = self.factors(features).prod(1).sum(-1)
        return self.bias + self.linear(features).sum((1, 2)) + pairs


def save(path, model, optimizer, epoch, steps):
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"epoch": epoch, "steps": steps}
    torch.save(state, path + ".new")
    os.rename(path + ".new", path)


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = DistributedDataParallel(FactorizationMachine())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    log = ClickLog(rank, world_size, args.batch)
    loader = DataLoader(log, batch_size=args.batch, num_workers=2)
    test = [click(number) for number in range(N_TRAIN + rank, N_TRAIN + N_TEST, world_size)]
    features, clicked = (torch.stack(column) for column in zip(*test))

    first_epoch = first_step = 0
    if os.path.exists(args.state):
        state = torch.load(args.state, map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, first_step = state["epoch"], state["steps"]

    for epoch in range(first_epoch, args.epochs):
        log.epoch, log.first_step = epoch, first_step
        for step, (x, y) in enumerate(loader, first_step + 1):
            optimizer.zero_grad(set_to_none=True)
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
            if rank == 0 and step % args.save_every == 0:
                save(args.state, model, optimizer, epoch, step)
        first_step = 0
        with torch.no_grad():
            logits = model.module(features)
            log_loss = F.binary_cross_entropy_with_logits(logits, clicked, reduction="sum")
        sums = torch.stack([log_loss, torch.tensor(float(len(clicked)))])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch + 1}: test log loss {sums[0] / sums[1]:.5f} of {sums[1]:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=12)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--save-every", type=int, default=8)
    p.add_argument("--state", default="clicks.pt")
    main(p.parse_args())
