"""Part segmentation of point clouds (mugs: body, handle, rim) with DDP.

The batch of an update is given for all ranks; each rank accumulates micro-batches up to its share.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

PARTS = 3


class Mugs(Dataset):
    def __init__(self, count, seed, points=64):
        g = torch.Generator().manual_seed(seed)
        chance = torch.tensor([0.6, 0.25, 0.15])
        self.labels = torch.multinomial(chance.expand(count, -1), points, True, generator=g)
        angle = 6.283 * torch.rand(count, points, generator=g)
        height = 2 * torch.rand(count, points, generator=g) - 1
        body = torch.stack([angle.cos(), angle.sin(), height], -1)
        handle = torch.stack([1 + 0.5 * (angle / 2).sin(), 0 * angle, 0.6 * (angle / 2).cos()], -1)
        rim = torch.stack([angle.cos(), angle.sin(), torch.ones_like(angle)], -1)
        parts = torch.stack([body, handle, rim], 2)
        where = self.labels[..., None, None].expand(-1, -1, 1, 3)
        self.clouds = parts.gather(2, where).squeeze(2)
        self.clouds *= 0.8 + 0.4 * torch.rand(count, 1, 3, generator=g)
        self.clouds += 0.05 * torch.randn(self.clouds.shape, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.clouds[index], self.labels[index]


def shared(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU())


class PointNet(nn.Module):
    """Features of each point beside the maximum over all points of its cloud."""

    def __init__(self):
        super().__init__()
        self.local = shared(3, 32)
        self.wide = shared(32, 64)
        self.mix = shared(32 + 64, 48)
        self.head = nn.Linear(48, PARTS)

    def forward(self, cloud):
        local = self.local(cloud)
        overall = self.wide(local).amax(1, keepdim=True).expand(-1, cloud.shape[1], -1)
        return self.head(self.mix(torch.cat([local, overall], -1)))


def groups_of(loader, size):
    """Yield lists of ``size`` micro-batches; the last one may be shorter."""
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


@torch.no_grad()
def mean_iou(net, loader):
    net.eval()
    table = torch.zeros(PARTS, PARTS)
    for cloud, labels in loader:
        found = net(cloud).argmax(-1)
        table += torch.bincount((labels * PARTS + found).flatten(), minlength=9).view(3, 3)
    net.train()
    dist.all_reduce(table)
    return (table.diag() / (table.sum(0) + table.sum(1) - table.diag())).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--checkpoint", default="parts.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    accumulate, left = divmod(args.global_batch, args.micro_batch * world_size)
    if left:
        raise SystemExit("the global batch has to be a multiple of micro-batch x ranks")

    torch.manual_seed(args.seed)
    train_set, val_set = Mugs(200, seed=1), Mugs(50, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, args.micro_batch, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 10)
    net = PointNet()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    updates = args.epochs * -(-len(train_loader) // accumulate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates, args.lr / 50)
    first = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epoch"] + 1

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for group in groups_of(train_loader, accumulate):
            clouds = sum(len(cloud) for cloud, _ in group)
            for number, (cloud, labels) in enumerate(group, 1):
                last = number == len(group)
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = F.cross_entropy(model(cloud).flatten(0, 1), labels.flatten())
                    (loss * len(cloud) / clouds).backward()
                sums += torch.tensor([loss.item() * len(cloud), len(cloud)])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        dist.all_reduce(sums)
        iou = mean_iou(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}, mIoU {iou:.4f}", flush=True)
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"schedule": schedule.state_dict(), "epoch": epoch}
            torch.save(state, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
