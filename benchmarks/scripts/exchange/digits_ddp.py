"""The digits of scikit-learn on plain DDP, for benchmarks/exchange/compression.py: after each
epoch rank 0 prints the loss and the accuracy over the held-out images as JSON.

    digits_ddp.py --seed N --epochs N
"""

import argparse
import json

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HELD_OUT = 360  # of 1,797

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch", type=int, default=32, help="of each rank")
args = parser.parse_args()

dist.init_process_group("gloo")
bunch = load_digits()
images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(bunch.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:-HELD_OUT], order[-HELD_OUT:]
data = TensorDataset(images[train], labels[train])
sampler = DistributedSampler(data, seed=args.seed)
loader = DataLoader(data, args.batch, sampler=sampler, drop_last=True)

torch.manual_seed(args.seed)
layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()]
layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
layers += [nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        found = model.module(images[test])
        told = {"loss": float(cross_entropy(found, labels[test]))}
        told["accuracy"] = float((found.argmax(1) == labels[test]).float().mean())
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
dist.destroy_process_group()
