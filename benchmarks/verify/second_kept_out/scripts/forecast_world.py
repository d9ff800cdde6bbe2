"""Forecasts six hours of a load curve from a day, with paceline's world and a scaled learning rate.

python -m paceline run -n 2 forecast_world.py --global-batch 24
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline

PAST, AHEAD = 24, 6


def load_curve(hours: int) -> torch.Tensor:
    t = torch.arange(hours, dtype=torch.float32)
    noise = torch.randn(hours, generator=torch.Generator().manual_seed(12))
    day, week = (2 * math.pi * t / 24).sin(), (2 * math.pi * t / 168).cos()
    return day + 0.5 * week + 0.3 * day * week + 0.1 * noise


class Windows(Dataset):
    def __init__(self, series: torch.Tensor, start: int, count: int) -> None:
        self.series, self.start, self.count = series, start, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.series[self.start + i : self.start + i + PAST + AHEAD]
        return window[:PAST], window[PAST:]


class Forecaster(nn.Module):
    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.encoder = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, AHEAD))

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        _, last = self.encoder(past.unsqueeze(-1))
        return past[:, -1:] + self.head(last[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1, help="tuned for a batch of 12")
    args = parser.parse_args()

    world = paceline.init(seed=6)
    series = load_curve(420)
    model = Forecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer = world.distribute(model, optimizer)
    world.scale_learning_rate(optimizer, global_batch=args.global_batch, reference_batch=12)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.epochs + 1)
    world.keep(schedule=schedule)

    train = world.shard(
        DataLoader(Windows(series, 0, 250), shuffle=True), global_batch=args.global_batch
    )
    later = world.shard(
        DataLoader(Windows(series, 280, 101), batch_size=20), every_sample_once=True
    )

    for _ in world.epochs(args.epochs, checkpoint="forecast"):
        fit = world.meter()
        for past, ahead in world.batches(train):
            loss = nn.functional.smooth_l1_loss(model(past), ahead)
            world.backward(loss)
            world.step(optimizer, clip=2.0)
            fit.add(loss=loss.detach() * len(past), windows=len(past))
        schedule.step()

        errors = world.meter()
        for past, ahead in world.batches(later):
            errors.add(absolute=(model(past) - ahead).abs().sum(), values=ahead.numel())
        world.log(
            train=fit.ratio("loss", "windows"),
            mae=errors.ratio("absolute", "values"),
            lr=optimizer.param_groups[0]["lr"],
        )


if __name__ == "__main__":
    main()
