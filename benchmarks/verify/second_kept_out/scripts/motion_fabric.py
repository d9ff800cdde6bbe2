"""Activity recognition from motion sensors with Lightning Fabric.

PyTorch's SyncBatchNorm needs a GPU. Here the norms are those of the batch of all ranks on a CPU too:
sums are exchanged with gradient, and running statistics are equal on all ranks.
"""

import os

import torch
import torch.distributed.nn.functional as collective
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CHANNELS, LENGTH, ACTIVITIES = 6, 32, 4


class Recordings(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.activity = torch.arange(count) % ACTIVITIES
        t = torch.arange(LENGTH) * 0.4
        pace = 1 + 0.5 * self.activity[:, None, None] + 0.1 * torch.randn(count, 1, 1, generator=g)
        shift = 6.28 * torch.rand(count, CHANNELS, 1, generator=g)
        self.motion = 2 * torch.sin(pace * t + shift) + torch.randn(
            count, CHANNELS, LENGTH, generator=g
        )

    def __len__(self):
        return len(self.activity)

    def __getitem__(self, i):
        return self.motion[i], self.activity[i]


class BatchNormOfAllRanks(nn.BatchNorm1d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        over = [0, 2] if x.dim() == 3 else [0]
        count = x.new_tensor([x.numel() / self.num_features])
        sums = torch.cat([x.sum(over), x.square().sum(over), count])
        if torch.distributed.is_initialized():
            sums = collective.all_reduce(sums)
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        var = square - mean.square()
        with torch.no_grad():
            count = sums[-1]
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        shape = (1, -1, 1) if x.dim() == 3 else (1, -1)
        scale = self.weight * (var + self.eps).rsqrt()
        return x * scale.view(shape) + (self.bias - mean * scale).view(shape)


def of_all_ranks(module):
    """Replace the batch norms of a module."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d):
            setattr(module, name, BatchNormOfAllRanks(child.num_features))
        else:
            of_all_ranks(child)
    return module


class MotionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(CHANNELS, 16, 5, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 24, 5, stride=2, bias=False),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(48, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, ACTIVITIES)
        )

    def forward(self, motion):
        return self.head(self.trunk(motion))


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(11)
    model = of_all_ranks(MotionNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model, optimizer = fabric.setup(model, optimizer)

    train_set = Recordings(192, 0)
    sampler = DistributedSampler(train_set, fabric.world_size, fabric.global_rank, seed=11)
    loader = DataLoader(train_set, int(os.environ.get("PER_RANK", 8)), sampler=sampler)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    test_set = Recordings(72, 1)
    mine = slice(fabric.global_rank, None, fabric.world_size)

    for epoch in range(int(os.environ.get("EPOCHS", 3))):
        sampler.set_epoch(epoch)
        model.train()
        seen = torch.zeros(2)
        for motion, activity in loader:
            loss = nn.functional.cross_entropy(model(motion), activity)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen += torch.tensor([loss.item() * len(activity), len(activity)])
        model.eval()
        with torch.no_grad():
            hits = (model(test_set.motion[mine]).argmax(1) == test_set.activity[mine]).sum()
        hits = fabric.all_reduce(hits, reduce_op="sum").item()
        seen = fabric.all_reduce(seen, reduce_op="sum")
        train_loss = seen[0] / seen[1]
        fabric.print(f"{epoch=} loss={train_loss:.5f} accuracy={hits / len(test_set):.4f}")


if __name__ == "__main__":
    main()
