"""Image denoising with a GroupNorm network; the rate falls when validation does not improve.

Stops and goes on at any epoch:  torchrun --nproc-per-node 2 denoise_plateau.py --epochs 5
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def stripes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of stripes, with noise and without."""
    g = torch.Generator().manual_seed(seed)
    angle, phase = 3.14 * torch.rand(2, count, 1, 1, generator=g)
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    clean = (x * angle.cos() + y * angle.sin() + phase).sin().unsqueeze(1)
    return clean + 0.4 * torch.randn(clean.shape, generator=g), clean


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.LeakyReLU(0.1)
    )


class Denoiser(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(block(1, width), block(width, width))
        self.tail = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor) -> Tensor:
        return noisy - self.tail(self.body(noisy))


@dataclass
class Run:
    model: DDP
    optimizer: torch.optim.Optimizer
    plateau: torch.optim.lr_scheduler.ReduceLROnPlateau
    epoch: int = 0

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "plateau": self.plateau.state_dict(),
            "epoch": self.epoch,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.plateau.load_state_dict(state["plateau"])
        self.epoch = state["epoch"]


def validate(model: nn.Module, noisy: Tensor, clean: Tensor, size: int = 8) -> float:
    """Mean squared error of all images: every n-th batch on each of n ranks."""
    starts = range(0, len(noisy), size)[dist.get_rank() :: dist.get_world_size()]
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for start in starts:
            told, wanted = model(noisy[start : start + size]), clean[start : start + size]
            sums[0] += (told - wanted).square().sum().item()
            sums[1] += wanted.numel()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images-per-rank", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--to", type=Path, default=Path("denoiser.pt"))
    args = parser.parse_args()
    dist.init_process_group("gloo")

    torch.manual_seed(15)
    model = DDP(Denoiser())
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.3, patience=0, threshold=0.3
    )
    run = Run(model, optimizer, plateau)
    if args.to.exists():
        run.load(args.to)

    train = TensorDataset(*stripes(120, seed=0))
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, args.images_per_rank, sampler=sampler)
    held_out = stripes(56, seed=1)
    while run.epoch < args.epochs:
        sampler.set_epoch(run.epoch)
        model.train()
        for noisy, clean in loader:
            loss = (model(noisy) - clean).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        error = validate(model.module, *held_out)
        plateau.step(error)
        run.epoch += 1
        if dist.get_rank() == 0:
            run.save(args.to)
            print(f"{run.epoch}: error {error:.6f}, rate {optimizer.param_groups[0]['lr']:.5f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
