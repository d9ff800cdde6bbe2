"""Self-distillation without labels (BYOL): a student predicts what a slow teacher makes of another
view of the same trajectory. Views are drawn on each rank; the learning rate goes with the batch.
"""

import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def trajectories(n, seed):
    """Curves in the plane of four sorts, which differ in the turns of their circles."""
    g = torch.Generator().manual_seed(seed)
    sort = torch.randint(4, (n,), generator=g)
    phase = 6.283 * torch.rand(n, 1, generator=g)
    turn = torch.linspace(0, 6.283, 48) * (1.0 + sort[:, None]) + phase
    curve = torch.stack([turn.cos(), turn.sin()], 1) * torch.linspace(0.5, 1, 48)
    return curve + 0.05 * torch.randn(curve.shape, generator=g), sort


class TwoViews(Dataset):
    def __init__(self, curves):
        self.curves = curves

    def __len__(self):
        return len(self.curves)

    def view(self, curve):
        angle = 6.283 * torch.rand(())
        spin = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
        start = int(torch.randint(0, 17, ()))
        cut = (spin @ curve)[:, start : start + 32]
        return cut * (0.8 + 0.4 * torch.rand(())) + 0.05 * torch.randn(cut.shape)

    def __getitem__(self, i):
        return self.view(self.curves[i]), self.view(self.curves[i])


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 24, 5, stride=2, padding=2)
        self.conv2 = nn.Conv1d(24, dim, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(4, 24)
        self.project = nn.Sequential(
            nn.Linear(dim, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 16)
        )

    def features(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        return F.relu(self.conv2(x)).mean(-1)

    def forward(self, x):
        return self.project(self.features(x))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.predict = nn.Sequential(
            nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 16)
        )

    def forward(self, x):
        return self.predict(self.encoder(x))


def agreement_loss(online, target):
    online, target = F.normalize(online, dim=-1), F.normalize(target, dim=-1)
    return 2 - 2 * (online * target).sum(-1).mean()


@torch.no_grad()
def update_teacher(teacher, encoder, momentum):
    for slow, fast in zip(teacher.parameters(), encoder.parameters()):
        slow.mul_(momentum).add_(fast, alpha=1 - momentum)


@torch.no_grad()
def neighbours(encoder, bank, bank_sort, curves, sorts, rank, world):
    """Share of test curves whose nearest curve of the bank is of the same sort."""
    keys = F.normalize(encoder.features(bank), dim=-1)
    mine = F.normalize(encoder.features(curves[rank::world]), dim=-1)
    found = bank_sort[(mine @ keys.T).argmax(1)]
    right = (found == sorts[rank::world]).sum().float()
    dist.all_reduce(right)
    return right.item() / len(curves)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--base-lr", type=float, default=0.4, help="for 256 samples in all")
    parser.add_argument("--momentum", type=float, default=0.97)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    student = Student()
    teacher = copy.deepcopy(student.encoder).requires_grad_(False)
    model = DDP(student)
    lr = args.base_lr * args.batch * world / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    curves, _ = trajectories(240, seed=0)
    bank, bank_sort = trajectories(80, seed=1)
    test, test_sort = trajectories(60, seed=2)
    dataset = TwoViews(curves)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    steps, step = args.epochs * len(loader), 0
    torch.manual_seed(100 + rank)  # other views on each rank

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(2)
        for one, other in loader:
            with torch.no_grad():
                target_one, target_other = teacher(one), teacher(other)
            online_one, online_other = model(torch.cat([one, other])).chunk(2)
            loss = agreement_loss(online_one, target_other)
            loss = loss + agreement_loss(online_other, target_one)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            share = (1 + math.cos(math.pi * step / steps)) / 2
            update_teacher(teacher, student.encoder, 1 - (1 - args.momentum) * share)
            losses += torch.tensor([loss.item() * len(one), len(one)])
            step += 1
        dist.all_reduce(losses)
        near = neighbours(
            teacher, bank[..., :32], bank_sort, test[..., :32], test_sort, rank, world
        )
        if rank == 0:
            print(
                f"epoch {epoch} loss {losses[0] / losses[1]:.5f} neighbours {near:.3f}", flush=True
            )
            state = dict(student=student.state_dict(), teacher=teacher.state_dict(), step=step)
            torch.save(state | dict(optimizer=optimizer.state_dict(), epoch=epoch), "last.tmp")
            os.replace("last.tmp", "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
