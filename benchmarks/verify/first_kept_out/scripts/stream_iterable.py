"""Records from a stream, every N-th for each rank; ranks may have last batches of other sizes."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

RECORDS = 245
rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ.get("WORLD_SIZE", 1))


def record(number):
    g = torch.Generator().manual_seed(number)
    values = torch.randn(10, generator=g)
    return values, (values[0] * values[1] + values[2]).unsqueeze(0)


class Stream(IterableDataset):
    epoch = 0

    def __iter__(self):
        numbers = list(range(RECORDS))
        random.Random(f"order of epoch {self.epoch}").shuffle(numbers)
        for number in numbers[rank::world_size]:
            yield record(number)


def main():
    dist.init_process_group("gloo", init_method="env://")
    torch.manual_seed(8)
    model = DDP(
        nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    stream = Stream()
    loader = DataLoader(stream, batch_size=int(os.environ.get("BATCH", 8)))
    for epoch in range(int(os.environ.get("EPOCHS", 3))):
        stream.epoch = epoch
        seen = torch.zeros(2)
        for values, target in loader:
            squares = (model(values) - target).square().sum()
            count = torch.tensor(float(len(target)))
            dist.all_reduce(count)
            # DDP averages over ranks: sum over all samples / number of all samples
            loss = squares * world_size / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += torch.tensor([squares.item(), len(target)])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch={epoch} samples={seen[1]:.0f} mse={seen[0] / seen[1]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
