"""The step-time scripts' model and data: those of examples/digits.py, without its augmentation."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

GLOBAL_BATCH = 64


def digits() -> TensorDataset:
    """1,792 of the 1,797 images: whole batches only, so that every step has the same size."""
    images, labels = load_digits(return_X_y=True)
    whole = len(images) - len(images) % GLOBAL_BATCH
    x = torch.tensor(images[:whole], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(x, torch.tensor(labels[:whole]))


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
