"""One process, no torch.distributed: regression with SGD."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    """Sampled sine waves; the target is their frequency."""

    def __init__(self, size, points=512):
        g = torch.Generator().manual_seed(0)
        self.frequency = torch.rand(size, 1, generator=g)
        self.t = torch.linspace(0, 20, points)

    def __len__(self):
        return len(self.frequency)

    def __getitem__(self, i):
        return torch.sin(self.frequency[i] * self.t), self.frequency[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(Waves(10 * args.batch), batch_size=args.batch, shuffle=True)
    model = nn.Sequential(
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loss_fn = nn.MSELoss()

    step = 0
    while step < args.steps:
        for x, y in loader:
            prediction = model(x)
            loss = loss_fn(prediction, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        print(f"step {step}, loss {loss.item():.5f}")
    print(f"final loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
