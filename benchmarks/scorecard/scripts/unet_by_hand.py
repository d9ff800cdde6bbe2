"""Segmentation of memory-mapped slices with a small U-Net. Gradients are averaged by hand, flat."""

import os
import tempfile

import numpy as np
import torch
import torch.distributed as td
from torch import nn

BATCH, SIDE, SLICES = 16, 48, 512
LR = 5e-3


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.LeakyReLU(0.1))


class UNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.d1, self.d2 = conv(1, c), conv(c, 2 * c)
        self.mid = conv(2 * c, 2 * c)
        self.u2, self.u1 = conv(4 * c, c), conv(2 * c, c)
        self.out = nn.Conv2d(c, 1, 1)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        m = self.up(self.mid(self.pool(b)))
        # <forward h=m>
        y = self.up(self.u2(torch.cat([m, b], 1)))
        return self.out(self.u1(torch.cat([y, a], 1)))


def volume(rank):
    """Every rank writes its own part of the scan once, and maps it."""
    path = os.path.join(tempfile.mkdtemp(), f"scan{rank}.npy")
    scan = np.lib.format.open_memmap(path, "w+", np.float32, (SLICES, 2, SIDE, SIDE))
    scan[:] = np.random.default_rng(rank).random(scan.shape, dtype=np.float32)
    scan.flush()
    return np.load(path, mmap_mode="r")


def batches(scan, seed):
    rng = np.random.default_rng(seed)
    while True:
        for at in rng.permutation(SLICES // BATCH):
            part = np.array(scan[at * BATCH : (at + 1) * BATCH])
            # <sample x=part i=int(at)>
            part = torch.from_numpy(part)
            yield part[:, :1], (part[:, 1:] > 0.5).float()


def average(params, size):
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    td.all_reduce(flat)
    flat /= size
    at = 0
    for p in params:
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


td.init_process_group("gloo")
RANK, SIZE = td.get_rank(), td.get_world_size()
torch.manual_seed(1)
# <start rank=RANK world=SIZE>
net = UNet().to(memory_format=torch.channels_last)
# <model model=net>
params = list(net.parameters())
opt = torch.optim.AdamW(params, lr=LR)
bce = nn.BCEWithLogitsLoss()
for n, (x, y) in enumerate(batches(volume(RANK), RANK), 1):
    x = x.contiguous(memory_format=torch.channels_last)
    # <batch x=x>
    loss = bce(net(x), y)
    # <loss loss=loss model=net again=net(x) x=x>
    opt.zero_grad()
    loss.backward()
    # <backward model=net loss=loss>
    average(params, SIZE)
    opt.step()
    # <step model=net optimizer=opt loss=loss step=n rank=RANK again=net(x)>
    if n % 200 == 0 and RANK == 0:
        print("step", n, "loss", float(loss))
    if n == 100_000:
        break
td.destroy_process_group()
