"""Handwritten digits, with three common mistakes: docs/how-to/improve/slow-job.md makes it fast.

A plain PyTorch script for torchrun or `paceline run`, which does not import Paceline.

    paceline diagnose -n 2 --try all --html found.html examples/slow.py
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ANSWERS = 0.0005  # s: how long a file system that many share takes to answer
MICRO = 4  # batches of an optimizer step


class Digits(Dataset):
    """Images that come from a file system which takes its time."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(ANSWERS)
        return self.images[i].flatten(), self.labels[i]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(8)  # as on the workstation
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(1024, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = Digits()
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, 32, sampler=sampler)
    seen = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels) / MICRO
            loss.backward()  # the exchange of all gradients, each time
            seen += 1
            if seen % MICRO == 0:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {MICRO * loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
