"""Surrogate of an advection-diffusion solver: learns the step from one frame to a later one.

The solver's runs are .npy files, which are made by the first process and then read by all as memory
maps. Inputs get a little noise, so that roll-outs stay stable.

    torchrun --nproc-per-node 2 flow_surrogate.py --epochs 4
"""

import argparse
import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GRID, FRAMES, RUNS = 16, 27, 9  # the last run is for validation
LEAD = 3


def solve(seed: int) -> np.ndarray:
    """A blob that is carried along and spreads, with float32 frames of (1, GRID, GRID)."""
    rng = np.random.default_rng(seed)
    wave = 2 * math.pi * np.fft.fftfreq(GRID)
    kx, ky = np.meshgrid(wave, wave, indexing="xy")
    vx, vy = rng.uniform(-0.6, 0.6, 2)
    step = np.exp(-1j * (kx * vx + ky * vy) - 0.05 * (kx**2 + ky**2))
    state = np.fft.fft2(rng.uniform(0.5, 4) * rng.normal(size=(GRID, GRID)))
    state *= np.exp(-1.5 * (kx**2 + ky**2))
    frames = []
    for _ in range(FRAMES):
        frames.append(np.fft.ifft2(state).real)
        state = state * step
    return np.stack(frames).astype(np.float32)[:, None]


def write_runs() -> Path:
    """Make the folder of runs on rank 0, and tell all ranks where it is."""
    told = [None]
    if dist.get_rank() == 0:
        folder = Path(tempfile.mkdtemp(prefix="flow_"))
        for run in range(RUNS):
            np.save(folder / f"run_{run:03d}.npy", solve(run))
        told = [str(folder)]
    dist.broadcast_object_list(told, src=0)
    return Path(told[0])


class FramePairs(Dataset):
    """A frame, and the change from it to the frame LEAD steps later; both normalized."""

    def __init__(self, files, mean=0.0, std=1.0):
        self.runs = [np.load(file, mmap_mode="r") for file in files]
        self.per_run = FRAMES - LEAD
        self.mean, self.std = mean, std

    def __len__(self):
        return self.per_run * len(self.runs)

    def __getitem__(self, index):
        run, frame = divmod(index, self.per_run)
        pair = torch.from_numpy(np.array(self.runs[run][[frame, frame + LEAD]]))
        now, later = (pair - self.mean) / self.std
        return now, later - now


def statistics(files):
    """Mean and standard deviation of the values of all frames."""
    values = np.stack([np.load(file) for file in files])
    return float(values.mean()), float(values.std())


class Surrogate(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        same = dict(padding=1, padding_mode="circular")
        self.lift = nn.Conv2d(1, width, 3, **same)
        self.mix = nn.ModuleList(nn.Conv2d(width, width, 3, **same) for _ in range(2))
        self.project = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        for conv in self.mix:
            x = x + torch.nn.functional.gelu(conv(x))
        return self.project(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8, help="per process")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="for a batch of 8")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder = write_runs()
    files = sorted(folder.glob("run_*.npy"))
    train_files, test_files = files[:-1], files[-1:]
    mean, std = statistics(train_files)
    train_set = FramePairs(train_files, mean, std)
    test_set = FramePairs(test_files, mean, std)

    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    test_inputs, test_targets = map(torch.stack, zip(*(test_set[i] for i in range(len(test_set)))))

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Surrogate())
    lr = args.lr * args.batch_size * world_size / 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-3)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 5, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )

    torch.manual_seed(args.seed + 1 + rank)  # every process has its own noise
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for frame, change in loader:
            noise = args.noise * torch.randn_like(frame)
            loss = (model(frame + noise) - (change - noise)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += torch.tensor([loss.item() * len(frame), len(frame)])
        dist.all_reduce(total)
        with torch.no_grad():
            error = (model.module(test_inputs) - test_targets).square().mean().sqrt()
        if rank == 0:
            print(f"epoch {epoch}: train {total[0] / total[1]:.5f} test rmse {std * error:.5f}")

    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
