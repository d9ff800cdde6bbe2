"""A GAN on vectors: two models, two optimizers, each model in its own DDP."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Generator(nn.Module):
    def __init__(self, latent, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(latent, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, width)
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Sequential):
    def __init__(self, width):
        super().__init__(
            *[nn.Linear(width, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.LeakyReLU(0.2)],
            *[nn.Linear(256, 1), nn.Flatten(0)],
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--latent", type=int, default=64)
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    generator = DDP(Generator(args.latent, 256))
    discriminator = DDP(Discriminator(256))
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    mix = torch.randn(8, 256)
    ones, zeros = torch.ones(args.batch), torch.zeros(args.batch)

    torch.manual_seed(1 + dist.get_rank())
    for _ in range(args.steps):
        real = torch.randn(args.batch, 8) @ mix
        fake = generator(torch.randn(args.batch, args.latent))

        # the discriminator: real from fake
        opt_d.zero_grad()
        loss_d = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        loss_d.backward()
        opt_d.step()

        # the generator: fool it
        opt_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        loss_g.backward()
        opt_g.step()

    if dist.get_rank() == 0:
        print(f"final loss of D {loss_d.item():.4f}, of G {loss_g.item():.4f}")


if __name__ == "__main__":
    main()
