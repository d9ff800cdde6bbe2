"""A DDP loop in which every second step is sampled for the gradient noise scale, for
benchmarks/recording/noise_scale_cost.py. Arguments: file (the rank's number is added), samples of a
rank, steps in which Paceline chooses the sampled ones, pairs of steps.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from paceline.observe import attach

CALLS = 2000


def main(path: str, batch: int, free: int, pairs: int) -> None:
    dist.init_process_group("gloo")
    noise = attach._loop.recorder.gradient_noise
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(batch, 512)
    y = x[:, :16].sin()

    def step() -> float:
        begin = time.perf_counter()
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    for _ in range(free):
        step()
    interval, sampled = noise._interval, len(noise.kept)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * pairs):
        is_sampled = number % 4 in (0, 3)  # each is before the other as often as after it
        noise._due = 0 if is_sampled else sys.maxsize
        noise.is_sampling = is_sampled
        times[is_sampled].append(step())
    noise._due, noise.is_sampling = sys.maxsize, False
    begin = time.perf_counter()
    for _ in range(CALLS):
        noise.after_step(batch)
    unsampled = (time.perf_counter() - begin) / CALLS
    found = {
        "interval": interval,
        "sampled": sampled,
        "sampled_s": times[True],
        "unsampled_s": times[False],
        "call_s": unsampled,
    }
    Path(f"{path}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
