"""Train a model with two performance faults, which docs/explanation/diagnose.md diagnoses.

paceline diagnose -n 2 examples/two_faults.py --epochs 1000
"""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FEATURES, CLASSES = 256, 1000


class Lines(Dataset):
    """Samples as lines of text, like those of a CSV file."""

    def __init__(self, count: int) -> None:
        draw = random.Random(0)
        self.lines = [
            ",".join(f"{draw.random():.6f}" for _ in range(FEATURES)) for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        numbers = [float(text) for text in self.lines[i].split(",")]
        return torch.tensor(numbers), i % CLASSES


def top5_accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of samples whose label is one of the five largest scores."""
    found = 0
    for row, label in zip(scores.tolist(), labels.tolist(), strict=True):
        found += label in sorted(range(CLASSES), key=row.__getitem__)[-5:]
    return found / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Lines(8192)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 256, sampler=sampler)
    layers = [nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            accuracy = top5_accuracy(scores, labels)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, top 5 {accuracy:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
