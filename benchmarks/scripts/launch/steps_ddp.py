"""The digits loop in plain DDP. Arguments: file, warm-up steps, steps, view or copy."""

import sys
import time

import torch
import torch.distributed as dist
from digits import GLOBAL_BATCH, digits, network
from stopwatch import Stopwatch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main(path: str, warmup: int, steps: int, view: bool) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = digits()
    sampler: DistributedSampler[object] = DistributedSampler(data)
    train = DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(network(), gradient_as_bucket_view=view)
    optimizer = torch.optim.Adam(model.parameters())
    watch = Stopwatch(warmup, steps)
    for epoch in range((warmup + steps) // len(train) + 1):
        sampler.set_epoch(epoch)
        for x, y in train:
            if watch.start():
                break
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        watch.write(path)
    time.sleep(0.05)  # gloo's threads come to rest; without it, about one run in twenty aborts
    dist.destroy_process_group()


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "view")
