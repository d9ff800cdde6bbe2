"""One training step of a script written for torchrun; rank 0 writes down when it ended."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(32, 64), torch.randint(10, (32,))
nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(str(time.monotonic()))
time.sleep(0.05)  # gloo's threads come to rest; without it, about one run in twenty aborts
dist.destroy_process_group()
