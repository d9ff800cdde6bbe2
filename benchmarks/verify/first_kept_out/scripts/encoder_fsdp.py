"""FSDP2: a transformer encoder, two micro-batches a step, AdamW, clipping over the shards."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class CountOnes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randint(0, 6, (n, 16), generator=g)
        self.y = (self.x == 1).sum(1).clamp(max=4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(6, dim)
        self.position = nn.Parameter(0.02 * torch.randn(16, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.classify = nn.Linear(dim, 5)

    def forward(self, x):
        h = self.embed(x) + self.position
        for layer in self.layers:
            h = layer(h)
        return self.classify(h.mean(1))


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--bs", type=int, default=4)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--epochs", type=int, default=3)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(5)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    model = Encoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    train_set, test_set = CountOnes(192, 0), CountOnes(48, 1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.bs, sampler=sampler)
    test_loader = DataLoader(test_set, 16)
    lr_sched = torch.optim.lr_scheduler.StepLR(optim, step_size=1, gamma=0.8)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        ddp_loss = torch.zeros(2)
        for i, (x, y) in enumerate(loader):
            is_last = (i + 1) % args.accum == 0 or i + 1 == len(loader)
            model.set_requires_gradient_sync(is_last)
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / args.accum).backward()
            ddp_loss[0] += loss.item() * len(y)
            ddp_loss[1] += len(y)
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optim.step()
                optim.zero_grad()
        lr_sched.step()
        dist.all_reduce(ddp_loss)
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in test_loader:
                right += (model(x).argmax(1) == y).sum().item()
        if rank == 0:
            print(f"Train Epoch: {epoch} \tLoss: {ddp_loss[0] / ddp_loss[1]:.4f}")
            print(f"Test set: accuracy {right}/{len(test_set)} ({right / len(test_set):.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
