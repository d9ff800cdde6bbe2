"""Trains for ever. Rank 1 of the first attempt meets the fault at step 20: killed, raised or
stopped; what befalls its host is left to who looks for the file "reached". The others write down
when it was. After a restart ten more steps, and the end."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

fault, folder, timeout = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
again, rank = (folder / "fault").exists(), int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def meet() -> None:
    if fault in ("crashed", "cut off"):
        (folder / "reached").write_text(os.uname().nodename)
        return
    (folder / "fault").write_text(str(time.monotonic()))
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raised":
        raise RuntimeError("a fault")
    os.kill(os.getpid(), signal.SIGSTOP)


for step in range(10 if again else 1_000_000):
    if not again and step == 20 and rank == 1:
        meet()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if again and step == 0 and rank == 0 and not (folder / "again").exists():
        (folder / "again").write_text(str(time.monotonic()))
    time.sleep(0.01)
time.sleep(0.05)  # gloo's threads come to rest; without it, about one run in twenty aborts
dist.destroy_process_group()
