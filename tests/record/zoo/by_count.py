"""Loops that ask for as many batches as they know there are, and never for the one too many."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def batches(loader):
    iterator = iter(loader)
    for _ in range(len(loader)):
        yield next(iterator)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(1280, 512)
    train = DataLoader(TensorDataset(x, x[:, :16].sin()), batch_size=128)
    valid = DataLoader(TensorDataset(x[:384], x[:384, :16].sin()), batch_size=128)
    for _ in range(3):
        for x, y in batches(train):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            model.eval()
            for x, y in batches(valid):
                F.mse_loss(model(x), y)
            model.train()
    print(f"final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
