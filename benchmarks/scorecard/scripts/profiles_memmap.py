"""Regression from memory-mapped profiles; loader workers stay alive between epochs."""

import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

LEVELS, COUNT = 128, 12_800


class Profiles(Dataset):
    def __init__(self, path):
        self.profiles = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self.profiles)

    def __getitem__(self, row):
        profile = np.array(self.profiles[row])
        # <sample x=profile i=row>
        return profile, profile.mean(keepdims=True)


def build_net(width=384):
    return nn.Sequential(
        nn.Linear(LEVELS, width), nn.GELU(), Middle(width), nn.GELU(), nn.Linear(width, 1)
    )


class Middle(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width // 2)
        self.back = nn.Linear(width // 2, width)

    def forward(self, h):
        for _ in range(12):  # refined, with the same weights
            h = h + torch.tanh(self.back(self.linear(h)))
        # <forward h=h>
        return h


def train_epoch(ddp, net, loader, optimizer, rank, step):
    for profiles, means in loader:
        # <batch x=profiles>
        loss = nn.functional.mse_loss(ddp(profiles), means)
        # <loss loss=loss model=net again=net(profiles) x=profiles>
        optimizer.zero_grad()
        loss.backward()
        # <backward model=net loss=loss>
        optimizer.step()
        step += 1
        # <step model=net optimizer=optimizer loss=loss step=step rank=rank again=net(profiles)>
    return step


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # <start rank=rank world=world>
    path = os.path.join(tempfile.mkdtemp(), f"profiles{rank}.npy")
    rng = np.random.default_rng(0)
    np.save(path, rng.random((COUNT, LEVELS), dtype=np.float32))
    data = Profiles(path)
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=128, sampler=sampler, num_workers=1, persistent_workers=True
    )
    net = build_net()
    # <model model=net>
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
    step = 0
    for epoch in range(10_000):
        sampler.set_epoch(epoch)
        step = train_epoch(ddp, net, loader, optimizer, rank, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
