"""A GAN on points of two rings: two networks, two optimizers, noise of each rank."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--epochs", type=int, default=3)
opt = parser.parse_args()
LATENT = 8

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
D = nn.Sequential(
    nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
)
netG, netD = DDP(G), DDP(D)
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()

angle = torch.rand(384) * 6.2832
radius = 1 + (torch.arange(384) % 2).float()
points = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None])
sampler = DistributedSampler(points, drop_last=True)
loader = DataLoader(points, opt.batch, sampler=sampler, drop_last=True)
torch.manual_seed(100 + rank)

for epoch in range(opt.epochs):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        noise = torch.randn(len(real), LATENT)
        # discriminator
        fake = netG(noise)
        optD.zero_grad()
        lossD = bce(netD(torch.cat([real, fake.detach()])), torch.cat([ones, zeros]))
        lossD.backward()
        optD.step()
        # generator
        for p in D.parameters():
            p.requires_grad_(False)
        optG.zero_grad()
        lossG = bce(D(fake), ones)
        lossG.backward()
        optG.step()
        for p in D.parameters():
            p.requires_grad_(True)
    both = torch.stack([lossD.detach(), lossG.detach()]) / world
    dist.all_reduce(both)
    if rank == 0:
        print("[%d/%d] Loss_D: %.4f Loss_G: %.4f" % (epoch, opt.epochs, *both.tolist()))
dist.destroy_process_group()
