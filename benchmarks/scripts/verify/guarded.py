"""Train a small model with DistributedDataParallel, with a fault that sets in midway on request.

    paceline run -n 2 guarded.py --task digits --seed 3 --fault rate --at 350

Each rank reads its part of a global batch of the same samples that one rank would read.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

FAULTS = ("none", "rate", "replicas", "order", "labels")
DATA_SEED = 12345


def digits():
    """Handwritten digits, shifted by up to a pixel: 9,600 samples of 10 classes; a convolution."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32) / 16
    labels = torch.tensor(bunch.target)
    g = torch.Generator().manual_seed(DATA_SEED)
    pick = torch.randint(len(labels), (9600,), generator=g)
    moves = torch.randint(-1, 2, (9600, 2), generator=g)
    moved = [
        torch.roll(images[i], tuple(m), (0, 1)) for i, m in zip(pick, moves.tolist(), strict=True)
    ]
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(32 * 4, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return torch.stack(moved).unsqueeze(1), labels[pick], model, optimizer, cross_entropy, None


def teacher():
    """Classes of a random network of 32 inputs, 10 % of them wrong; a perceptron with Adam."""
    g = torch.Generator().manual_seed(DATA_SEED)
    x = torch.randn(9600, 32, generator=g)
    w1 = torch.randn(32, 24, generator=g) / 32**0.5
    w2 = torch.randn(24, 8, generator=g)
    y = (torch.tanh(2 * x @ w1) @ w2).argmax(1)
    wrong = torch.rand(9600, generator=g) < 0.1
    y = torch.where(wrong, torch.randint(8, (9600,), generator=g), y)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    model.append(nn.Linear(128, 8))
    return x, y, model, torch.optim.Adam(model.parameters(), lr=1e-3), cross_entropy, None


class Characters(nn.Module):
    """A recurrent model of characters. Input (N, T) of classes, output (N, classes, T)."""

    def __init__(self, classes):
        super().__init__()
        self.embed = nn.Embedding(classes, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.recurrent(self.embed(x))[0]).transpose(1, 2)


def text():
    """Characters of modules of Python's library, sequences of 24; a GRU with AdamW, warm-up."""
    folder = Path(os.__file__).parent
    whole = "".join((folder / f"{n}.py").read_text() for n in ("argparse", "inspect", "typing"))
    known = {c: i for i, c in enumerate(sorted(set(whole)))}
    data = torch.tensor([known[c] for c in whole[: 9600 * 25]]).view(-1, 25)
    model = Characters(len(known))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 50))
    return data[:, :-1], data[:, 1:], model, optimizer, cross_entropy, schedule


def waves():
    """Frequency and amplitude of noisy waves of 64 values; a 1D convolution with SGD, cosine."""
    g = torch.Generator().manual_seed(DATA_SEED)
    y = torch.rand(9600, 2, generator=g)
    phase = 6.28 * torch.rand(9600, 1, generator=g)
    t = torch.linspace(0, 1, 64)
    x = (0.3 + y[:, 1:]) * torch.sin(6.28 * (1 + 4 * y[:, :1]) * t + phase)
    x = (x + 0.2 * torch.randn(9600, 64, generator=g)).unsqueeze(1)
    model = nn.Sequential(
        *(nn.Conv1d(1, 16, 9, stride=2), nn.GELU(), nn.Conv1d(16, 32, 5, stride=2), nn.GELU()),
        *(nn.Flatten(), nn.Linear(32 * 12, 32), nn.GELU(), nn.Linear(32, 2)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 700)
    return x, y, model, optimizer, mse_loss, schedule


TASKS = {f.__name__: f for f in (digits, teacher, text, waves)}


class Parts(torch.utils.data.Sampler):
    """Batches of a rank: its part of each global batch, in an order by seed and epoch."""

    def __init__(self, y, batch, rank, size, seed):
        self.y, self.batch, self.rank, self.size, self.seed = y, batch, rank, size, seed
        self.epoch, self.is_sorted = 0, False

    def __len__(self):
        return len(self.y) // self.batch

    def __iter__(self):
        g = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(len(self.y), generator=g)
        for step in range(len(self)):
            if self.is_sorted:  # from here on: no shuffle
                key = self.y.reshape(len(self.y), -1)[:, 0].float()
                order, self.is_sorted = key.sort(stable=True).indices, False
            part = order[step * self.batch : (step + 1) * self.batch]
            yield part[self.rank :: self.size].tolist()


def scale_rate(optimizer, schedule, factor):
    for group in optimizer.param_groups:
        group["lr"] *= factor
    if schedule is not None:
        schedule.base_lrs = [factor * one for one in schedule.base_lrs]


def train(args, after_step=lambda samples: None):
    """Train one model; ``after_step`` is called with the samples of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    x, y, model, optimizer, loss_of, schedule = TASKS[args.task]()
    wrapped = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    sampler = Parts(y, args.batch, rank, size, args.seed)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=sampler)
    step = 0
    for sampler.epoch in range(args.epochs):
        for inputs, targets in loader:
            has_fault = args.fault != "none" and step >= args.at
            if has_fault and args.fault == "labels":
                targets = targets[torch.randperm(len(targets))]
            loss = loss_of(wrapped(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            if has_fault and step == args.at:
                sampler.is_sorted = args.fault == "order"
                if args.fault == "rate":
                    scale_rate(optimizer, schedule, 10)
                if args.fault == "replicas" and rank == size - 1:
                    scale_rate(optimizer, schedule, 0.5)
            optimizer.step()
            after_step(len(inputs))
            if schedule is not None:
                schedule.step()
            step += 1
            if args.print and step % args.print == 0 and rank == 0:
                print(f"step {step}, loss {loss.item():.5f}", flush=True)


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="of all ranks")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--at", type=int, default=0, help="step at which the fault sets in")
    parser.add_argument("--print", type=int, default=0, help="print the loss every N steps")
    return parser.parse_args(words)


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
