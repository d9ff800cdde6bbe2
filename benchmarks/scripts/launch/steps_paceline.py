"""The digits loop with Paceline. Arguments: file, warm-up steps, steps, record or not."""

import sys

import torch
from digits import GLOBAL_BATCH, digits, network
from stopwatch import Stopwatch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import paceline


def main(path: str, warmup: int, steps: int, record: bool) -> None:
    world = paceline.init(record=record)
    train = world.shard(DataLoader(digits(), batch_size=GLOBAL_BATCH // world.size, shuffle=True))
    model = network()
    model, optimizer = world.distribute(model, torch.optim.Adam(model.parameters()))
    watch = Stopwatch(warmup, steps)
    for _ in world.epochs((warmup + steps) // len(train) + 1):
        for x, y in world.batches(train):
            if watch.start():
                break
            loss = cross_entropy(model(x), y)
            world.backward(loss)
            world.step(optimizer)
    if world.rank == 0:
        watch.write(path)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "record")
