"""A variational autoencoder with dropout: seeds of each rank, validation split without repeats."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


@dataclass
class Config:
    batch_size: int = int(os.environ.get("BATCH_SIZE", "8"))
    epochs: int = int(os.environ.get("EPOCHS", "3"))
    lr: float = 1e-3
    seed: int = 21


class VAE(nn.Module):
    def __init__(self, inputs: int = 64, hidden: int = 48, latent: int = 6) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(0.2))
        self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decode = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, inputs)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encode(x)
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
        return self.decode(z), mu, logvar


def elbo(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """The negative ELBO of each sample, shape (batch,)."""
    logits, mu, logvar = output
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    divergence = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1)
    return reconstruction + divergence


def train(config: Config) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(config.seed)
    model = DistributedDataParallel(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)

    generator = torch.Generator().manual_seed(config.seed)
    digits = (torch.rand(303, 64, generator=generator) < 0.3).float()
    train_set, val_set = TensorDataset(digits[:256]), TensorDataset(digits[256:])
    sampler = DistributedSampler(train_set, seed=config.seed)
    train_loader = DataLoader(train_set, config.batch_size, sampler=sampler)
    val_part = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_part, config.batch_size)
    torch.manual_seed(config.seed + 1 + rank)

    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for (x,) in train_loader:
            loss = elbo(model(x), x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        sums = torch.zeros(2)
        with torch.no_grad():
            for (x,) in val_loader:
                sums += torch.tensor([elbo(model.module(x), x).sum().item(), float(len(x))])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} val_elbo {sums[0] / sums[1]:.4f} over {int(sums[1])} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Config())
