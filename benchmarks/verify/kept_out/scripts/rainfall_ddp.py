"""Statistical downscaling of rainfall: from coarse fields of a climate model to a finer grid.

    torchrun --nproc-per-node 2 rainfall_ddp.py --epochs 6

Errors are weighted with the area of the grid cells. The batch sizes are those of all processes.
"""

import argparse
import contextlib
import math
import os
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    epochs: int = 6
    micro_batch: int = 8
    accumulate: int = 4
    lr: float = 4e-3
    weight_decay: float = 0.02
    max_norm: float = 5.0
    width: int = 16
    seed: int = 11


class CoarseToFine(Dataset):
    """Days of humidity, temperature and uplift on 6 x 12 cells, and rain on 12 x 24 cells."""

    def __init__(self, days: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        noise = torch.randn(days, 3, 4, 6, generator=g)
        fine = nn.functional.interpolate(noise, size=(12, 24), mode="bicubic")
        humidity, temperature, uplift = fine.unbind(1)
        orography = torch.linspace(0, 9.42, 24).sin() * torch.linspace(0, 3.14, 12).sin()[:, None]
        self.rain = (humidity + 0.5 * uplift.relu() * (1 + orography) - 0.3 * temperature).relu()
        self.fields = nn.functional.avg_pool2d(fine, 2)

    def __len__(self):
        return len(self.rain)

    def __getitem__(self, day):
        return self.fields[day], self.rain[day]


class Downscaler(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Conv2d(3, width, 3)
        self.norm = nn.GroupNorm(4, width)
        self.finer = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.site = nn.Parameter(torch.zeros(width, 12, 24))
        self.out = nn.Conv2d(width, 1, 3)

    @staticmethod
    def around(x):
        """Longitudes go round the globe, latitudes do not."""
        return pad(pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1))

    def forward(self, x):
        x = self.norm(self.inner(self.around(x))).relu()
        x = (self.finer(x) + self.site).relu()
        return self.out(self.around(x)).squeeze(1)


def area_weights():
    latitude = torch.linspace(-82.5, 82.5, 12) * math.pi / 180
    return (latitude.cos() / latitude.cos().mean())[:, None]


class Trainer:
    def __init__(self, cfg: Config):
        self.cfg, self.rank, self.world = cfg, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = DistributedDataParallel(Downscaler(cfg.width))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, cfg.epochs)
        data, per_rank = CoarseToFine(144, seed=1), cfg.micro_batch // self.world
        self.sampler = DistributedSampler(data, seed=cfg.seed)
        self.loader = DataLoader(data, per_rank, sampler=self.sampler)
        self.held_out = CoarseToFine(45, seed=2)
        self.weights = area_weights()

    def loss(self, x, rain):
        return (self.weights * (self.model(x) - rain) ** 2).mean()

    def train_epoch(self, epoch: int):
        self.sampler.set_epoch(epoch)
        self.model.train()
        total, batches = 0.0, len(self.loader)
        for i, (x, rain) in enumerate(self.loader):
            first = i - i % self.cfg.accumulate
            group = min(self.cfg.accumulate, batches - first)  # the last group is smaller
            last = i + 1 == first + group
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.loss(x, rain)
                (loss / group).backward()
            total += loss.item()
            if last:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.scheduler.step()
        mean = torch.tensor(total / batches)
        dist.all_reduce(mean)
        return mean.item() / self.world

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        sums = torch.zeros(2)
        for day in range(self.rank, len(self.held_out), self.world):
            x, rain = self.held_out[day]
            error = self.weights * (self.model.module(x[None])[0] - rain) ** 2
            sums += torch.tensor([error.mean().item(), 1.0])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).sqrt().item()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            loss = self.train_epoch(epoch)
            rmse = self.evaluate()
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss:.5f}, rmse {rmse:.5f} mm/h", flush=True)
                torch.save(self.model.module.state_dict(), "downscaler.tmp")
                os.replace("downscaler.tmp", "downscaler.pt")


def main():
    parser = argparse.ArgumentParser()
    for one in fields(Config):
        parser.add_argument("--" + one.name.replace("_", "-"), type=one.type, default=one.default)
    dist.init_process_group("gloo")
    Trainer(Config(**vars(parser.parse_args()))).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
