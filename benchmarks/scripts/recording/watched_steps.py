"""A plain DDP loop that goes on until it is told, for benchmarks/recording/top_cost.py.

Arguments: folder (the file "end" there ends it; each rank's times go there) and batch.
"""

import itertools
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

ASK = 20  # steps between two looks whether it is to end


def batches(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def main(folder: Path, batch: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64 * batch, 512)
    train = batches(DataLoader(TensorDataset(x, x[:, :16].sin()), batch))
    stamps, end = array("q"), torch.zeros(1)
    for step in itertools.count():
        stamps.extend((time.monotonic_ns(), time.thread_time_ns()))
        x, y = next(train)
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % ASK == 0:
            (folder / f"up-{rank}").touch()
            end[0] = (folder / "end").exists()
            dist.broadcast(end, 0)
            if end.item():
                break
    (folder / f"stamps-{rank}").write_bytes(stamps.tobytes())
    dist.destroy_process_group()


main(Path(sys.argv[1]), int(sys.argv[2]))
