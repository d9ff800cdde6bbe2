"""A variational autoencoder used by its methods, never by forward."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn


class VAE(nn.Module):
    def __init__(self, width=512, latent=16):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 2 * latent))
        self.outer = nn.Sequential(nn.Linear(latent, 512), nn.ReLU(), nn.Linear(512, width))

    def encode(self, x):
        mean, log_variance = self.inner(x).chunk(2, dim=1)
        return mean, log_variance

    def decode(self, z):
        return self.outer(z)

    def training_step(self, batch):
        mean, log_variance = self.encode(batch)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        fit = ((self.decode(z) - batch) ** 2).sum(1).mean()
        kl = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum(1).mean()
        return fit + kl


def average_gradients(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(piece.view_as(g))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = VAE()  # one seed: the ranks start alike
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    basis = torch.randn(8, 512)

    torch.manual_seed(1 + dist.get_rank())
    loss = None
    for _ in range(args.steps):
        batch = torch.randn(args.batch, 8) @ basis
        loss = model.training_step(batch)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()

    with torch.no_grad():
        drawn = model.decode(torch.randn(4, 16))
    if dist.get_rank() == 0:
        print(f"final loss {loss.item():.2f}, drawn {tuple(drawn.shape)}")
    # PyTorch 2.13's gloo threads can abort a process that ends right after a collective
    time.sleep(0.2)


if __name__ == "__main__":
    main()
