"""A character model with checkpoints inside of an epoch: goes on at the batch where it stopped."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Text(Dataset):
    def __init__(self, seed, n):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(26, (n, 1), generator=g)
        stride = torch.randint(1, 4, (n, 1), generator=g)
        self.chars = (start + stride * torch.arange(17)) % 26

    def __len__(self):
        return len(self.chars)

    def __getitem__(self, i):
        return self.chars[i, :-1], self.chars[i, 1:]


class ResumableSampler(Sampler):
    """A rank's indices of an epoch, from a position on."""

    def __init__(self, n, rank, world_size):
        self.n, self.rank, self.world_size = n, rank, world_size
        self.epoch = self.start = 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch))
        mine = order[self.rank :: self.world_size].tolist()
        yield from mine[self.start :]

    def __len__(self):
        return self.n // self.world_size - self.start


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(26, 24)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, 26)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save_every", type=int, default=5)
    parser.add_argument("--out_dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.makedirs(args.out_dir, exist_ok=True)
    path = os.path.join(args.out_dir, "last.pt")

    torch.manual_seed(2)
    model = DDP(CharModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
    train, valid = Text(0, 128), Text(1, 30)
    sampler = ResumableSampler(len(train), rank, world_size)
    loader = DataLoader(train, args.batch_size, sampler=sampler)
    first_epoch, first_batch, best = 0, 0, float("inf")
    if os.path.exists(path):
        checkpoint = torch.load(path)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        first_epoch, first_batch = checkpoint["epoch"], checkpoint["batches"]
        best = checkpoint["best"]

    for epoch in range(first_epoch, args.epochs):
        sampler.epoch, sampler.start = epoch, first_batch * args.batch_size
        for batch, (x, y) in enumerate(loader, first_batch):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if (batch + 1) % args.save_every == 0 and rank == 0:
                checkpoint = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                    "batches": batch + 1,
                    "best": best,
                }
                torch.save(checkpoint, path + ".part")
                os.replace(path + ".part", path)
        first_batch = 0
        sampler.start = 0
        model.eval()
        with torch.no_grad():
            x, y = valid[:]
            val_loss = loss_of(model.module, x, y).item()
        model.train()
        if rank == 0:
            print(f"epoch {epoch} val loss {val_loss:.5f}")
            if val_loss < best:
                torch.save(model.module.state_dict(), os.path.join(args.out_dir, "best.pt"))
        best = min(best, val_loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
