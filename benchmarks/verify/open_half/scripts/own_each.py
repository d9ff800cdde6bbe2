"""Data parallelism by hand: broadcast of the parameters, an all-reduce for each gradient.

The last batch of an epoch is smaller, and not equal on all ranks: gradients are sums over samples,
divided by the number of samples of all ranks.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

batch_size = int(os.environ.get("BATCH_SIZE", 10))
epochs = int(os.environ.get("NUM_EPOCHS", 4))
lr = 0.03

dist.init_process_group(backend="gloo")
rank = dist.get_rank()
size = dist.get_world_size()

torch.manual_seed(42)
model = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))
for param in model.parameters():
    dist.broadcast(param.data, src=0)
ema = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

generator = torch.Generator().manual_seed(0)
x = torch.randn(215, 20, generator=generator)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
x_test = torch.randn(90, 20, generator=generator)
y_test = (x_test[:, 0] > 0).long() + (x_test[:, 1] > 0.5).long()


class Rows(torch.utils.data.Sampler):
    """This rank's rows of each epoch: every size-th of a permutation that is equal on all ranks."""

    def __init__(self, n):
        self.n = n
        self.epoch = 0

    def __iter__(self):
        g = torch.Generator().manual_seed(100 + self.epoch)
        order = torch.randperm(self.n, generator=g)
        return iter(order[rank::size].tolist())

    def __len__(self):
        return len(range(rank, self.n, size))


rows = Rows(len(x))
dataset = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=rows)
step = 0
for epoch in range(epochs):
    rows.epoch = epoch
    sums = torch.zeros(2)
    for inputs, targets in loader:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10)
        count = torch.tensor(float(len(targets)))
        dist.all_reduce(count)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets, reduction="sum")
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
            param.grad /= count
        optimizer.step()
        with torch.no_grad():
            for averaged, param in zip(ema.parameters(), model.parameters()):
                averaged.lerp_(param, 0.05)
        sums += torch.stack([loss.detach(), torch.tensor(float(len(targets)))])
        step += 1
    dist.all_reduce(sums)
    hits = torch.zeros(1)
    with torch.no_grad():
        start, stop = rank * len(x_test) // size, (rank + 1) * len(x_test) // size
        hits += (ema(x_test[start:stop]).argmax(1) == y_test[start:stop]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print("epoch", epoch, "loss %.5f" % (sums[0] / sums[1]), "acc", hits.item() / len(x_test))
