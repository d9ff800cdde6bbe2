"""Train a perceptron with DistributedDataParallel whose step takes about 50 ms on one core.

    paceline run -n 2 steady.py --time out.json

It validates and saves a checkpoint after each epoch, so that ``paceline verify`` runs all it has.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, CLASSES, BATCH, STEPS, EPOCHS = 1024, 10, 544, 40, 10


def dataset(samples, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 64, generator=g)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        nn.Linear(WIDTH, CLASSES),
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train = dataset(BATCH * STEPS * dist.get_world_size(), 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
    checked = DataLoader(dataset(BATCH, 2), batch_size=BATCH)
    path, first, times = Path("steady.pt"), 0, []
    if path.exists():
        state = torch.load(path)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            start = time.monotonic()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            times.append(time.monotonic() - start)
        with torch.no_grad():
            right = sum((net(x).argmax(1) == y).sum() for x, y in checked)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {int(right)} of {BATCH} right", flush=True)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, path)
        dist.barrier()
    if args.time and dist.get_rank() == 0:
        Path(args.time).write_text(json.dumps(min(times)))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--time", help="file for the shortest step time in s")
    main(parser.parse_args())
