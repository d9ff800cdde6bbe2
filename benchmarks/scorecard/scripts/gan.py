"""A GAN on point clouds: two networks, two optimizers, both DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as Parallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT, DIM, WIDTH, BATCH = 32, 64, 256, 384


def mlp(n_in, n_out):
    layers = [nn.Linear(n_in, WIDTH), nn.LeakyReLU(0.2)]
    for _ in range(2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, n_out))


class Gan:
    def __init__(self):
        self.plain_g, self.plain_d = mlp(LATENT, DIM), mlp(DIM, 1)
        # <model model=self.plain_g>
        self.g, self.d = Parallel(self.plain_g), Parallel(self.plain_d)
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=2e-4, betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=2e-4, betas=(0.5, 0.99))

    def critic_step(self, real):
        fake = self.plain_g(torch.randn(len(real), LATENT)).detach()
        score = self.d(torch.cat([real, fake]))
        loss = softplus(-score[: len(real)]).mean() + softplus(score[len(real) :]).mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss

    def generator_step(self, count):
        noise = torch.randn(count, LATENT)
        score = self.plain_d(self.g(noise))
        loss = softplus(-score).mean()
        # <loss loss=loss model=self.plain_g again=self.plain_g(noise) x=noise>
        self.opt_g.zero_grad()
        loss.backward()
        # <backward model=self.plain_g loss=loss>
        self.opt_g.step()
        return loss


def fit(gan, loader, sampler, epochs=10_000):
    count = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            # <batch x=real>
            gan.critic_step(real)
            loss = gan.generator_step(len(real))
            count += 1
            # <step model=gan.plain_g loss=loss step=count rank=dist.get_rank()>


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # <start rank=dist.get_rank() world=dist.get_world_size()>
    cloud = torch.randn(38_400, DIM) @ torch.randn(DIM, DIM) / 8
    data = TensorDataset(cloud)
    sampler = DistributedSampler(data)
    fit(Gan(), DataLoader(data, BATCH, sampler=sampler, drop_last=True), sampler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
