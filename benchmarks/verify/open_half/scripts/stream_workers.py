"""A stream of records, split by rank and worker; noise is added to them in the workers."""

import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class RecordStream(IterableDataset):
    def __init__(self, records, rank, world_size, seed=17):
        self.records, self.rank, self.world_size, self.seed = records, rank, world_size, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        order = list(range(len(self.records)))
        random.Random(self.seed + self.epoch).shuffle(order)  # the same on all ranks
        part, parts = self.rank * workers + worker, self.world_size * workers
        noise = torch.Generator().manual_seed((self.seed * 1000 + self.epoch) * 1000 + part)
        for number in order[part::parts]:
            record, label = self.records[number]
            yield record + 0.1 * torch.randn(record.shape, generator=noise), label


def make_records(count=256):
    g = torch.Generator().manual_seed(9)
    signals = torch.randn(count, 2, 40, generator=g)
    labels = (signals.abs().mean((1, 2)) > 0.8).long()
    return list(zip(signals, labels))


class SignalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 24, 5, padding=2)
        self.conv2 = nn.Conv1d(24, 24, 5, padding=2)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(24, 2)

    def forward(self, x):
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return self.fc(self.dropout(x.mean(-1)))


def run():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(SignalNet())
    torch.manual_seed(1000 + rank)  # other dropout on each rank
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    stream = RecordStream(make_records(), rank, world_size)
    loader = DataLoader(stream, batch_size=int(os.getenv("BATCH", "8")), num_workers=2)
    for epoch in range(int(os.getenv("EPOCHS", "3"))):
        stream.set_epoch(epoch)
        losses = []
        for signals, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(signals), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        mean /= world_size
        if rank == 0:
            print(f"Epoch {epoch}  mean loss over all ranks {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
