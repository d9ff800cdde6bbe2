"""Segments cells in microscope images with a small U-Net, until validation does not improve.

Norms use the batch of all ranks. best.pt has the weights of the best epoch, last.pt is what a stopped
run goes on from.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy, interpolate, max_pool2d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

BACKGROUND, BODY, NUCLEUS, SIZE = 0, 1, 2, 24


class Cells(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        self.masks = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
        for mask in self.masks:
            for _ in range(int(torch.randint(1, 4, (), generator=g))):
                at = 3 + (SIZE - 6) * torch.rand(2, generator=g)
                far = ((y - at[0]) ** 2 + (x - at[1]) ** 2).sqrt()
                radius = 3.5 + 2 * torch.rand((), generator=g)
                mask[(far < radius) & (mask == BACKGROUND)] = BODY
                mask[far < 0.45 * radius] = NUCLEUS
        bright = torch.tensor([0.0, 0.6, 1.1])[self.masks]
        lamp = 0.7 + 0.6 * torch.rand(count, 1, 1, generator=g)
        self.images = lamp * bright + 0.25 * torch.randn(bright.shape, generator=g)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, index):
        return self.images[index, None], self.masks[index]


class GlobalBatchNorm(nn.Module):
    """Batch normalization over all ranks of a group, of all if it is None."""

    def __init__(self, channels, group=None, momentum=0.1, eps=1e-5):
        super().__init__()
        self.group, self.momentum, self.eps = group, momentum, eps
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("var", torch.ones(channels, 1, 1))

    def average(self, value):
        value = value.mean((0, 2, 3)).view(-1, 1, 1)  # ranks have batches of equal size
        group = self.group or dist.group.WORLD
        return all_reduce(value, group=group) / dist.get_world_size(group)

    def forward(self, x):
        mean, var = self.mean, self.var
        if self.training:
            mean = self.average(x)
            var = self.average((x - mean) ** 2)
            self.mean.lerp_(mean.detach(), self.momentum)
            self.var.lerp_(var.detach(), self.momentum)
        return self.gain * (x - mean) / (var + self.eps).sqrt() + self.shift


class UNet(nn.Module):
    def __init__(self, width=8, group=None):
        super().__init__()

        def block(channels_in, channels_out):
            convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
            return nn.Sequential(convolution, GlobalBatchNorm(channels_out, group), nn.ReLU())

        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 2 * width)
        self.up2, self.up1 = block(4 * width, width), block(2 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(max_pool2d(one, 2))
        low = self.bottom(max_pool2d(two, 2))
        low = self.up2(torch.cat([interpolate(low, scale_factor=2), two], 1))
        return self.out(self.up1(torch.cat([interpolate(low, scale_factor=2), one], 1)))


class Confusion:
    """Pixels by class and guess, of all images and ranks."""

    def __init__(self):
        self.counts = torch.zeros(9)

    def add(self, logits, masks):
        self.counts += torch.bincount((3 * masks + logits.argmax(1)).flatten(), minlength=9)

    def mean_iou(self):
        dist.all_reduce(self.counts)
        table = self.counts.view(3, 3)
        both = table.diagonal()
        return (both / (table.sum(0) + table.sum(1) - both)).mean().item()


def part(count):
    """Images of this rank: neighbours, in parts whose sizes differ by one at most."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def validate(net, loader):
    net.eval()
    confusion, loss = Confusion(), torch.zeros(2)
    with torch.no_grad():
        for images, masks in loader:
            logits = net(images)
            confusion.add(logits, masks)
            loss[0] += cross_entropy(logits, masks, reduction="sum")
            loss[1] += masks.numel()
    net.train()
    dist.all_reduce(loss)
    return (loss[0] / loss[1]).item(), confusion.mean_iou()


def write(state, path):
    torch.save(state, path + ".part")
    os.replace(path + ".part", path)


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    net = UNet()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    train_set, val_set = Cells(128, 0), Cells(45, 1)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, part(len(val_set))), args.val_batch_size)

    start, best, without = 0, 0.0, 0
    if os.path.exists("last.pt"):
        state = torch.load("last.pt")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start, best, without = state["epoch"], state["best"], state["without"]

    for epoch in range(start, args.epochs):
        if without > args.patience:
            break
        sampler.set_epoch(epoch)
        for images, masks in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), masks).backward()
            optimizer.step()
        scheduler.step()
        loss, iou = validate(net, val_loader)
        is_best, without = iou > best, 0 if iou > best else without + 1
        best = max(iou, best)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.5f}, IoU {iou:.4f}, best {best:.4f}", flush=True)
            if is_best:
                write(net.state_dict(), "best.pt")
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}
            write(state | {"best": best, "without": without}, "last.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--val-batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=9)
    main(parser.parse_args())
