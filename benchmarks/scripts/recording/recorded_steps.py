"""A DDP loop that is recorded and not recorded in turns, for
benchmarks/recording/recording_cost.py.

Off means off: torch as it is, and the process group without the recorder around it. Every block
of steps wraps the same model anew in DDP, over the one or the other. Arguments: file (the rank's
number is added), warm-up steps, steps, batch, and the blocks as JSON.
"""

import contextlib
import gc
import inspect
import itertools
import json
import operator
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim
from torch.utils.data import DataLoader, TensorDataset, dataloader
from torch.utils.data.distributed import DistributedSampler

from paceline.observe import attach
from paceline.record.ring import stack_sampler
from paceline.record.ring.recorder import Recorder, now
from paceline.record.ring.states import State

SEAMS = [  # what the recorder replaces
    (nn.Module, "__call__"),
    (torch.autograd, "_engine_run_backward"),
    (optim.Optimizer, "zero_grad"),
    (dataloader._BaseDataLoaderIter, "__next__"),
    (dataloader.DataLoader, "__iter__"),
]
INNER = ("original", "function")  # names of the replaced function in its wrappers


def replaced(wrapper: Any) -> Any:
    """Return the function that wrappers of the recorder have replaced."""
    found = inspect.getclosurevars(wrapper).nonlocals
    inner = next((found[name] for name in INNER if name in found), None)
    return wrapper if inner is None else replaced(inner)


class Recording:
    """Takes the recording of this process away and puts it back."""

    def __init__(self) -> None:
        self.recorder: Recorder = attach._loop.recorder
        self.recorded = [getattr(place, name) for place, name in SEAMS]
        self.plain = [replaced(wrapper) for wrapper in self.recorded]
        assert all(map(operator.ne, self.recorded, self.plain))
        self.hooks = [optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks]
        self.hooked = [dict(hooks) for hooks in self.hooks]

    def switch(self, on: bool) -> None:
        functions = self.recorded if on else self.plain
        for (place, name), function in zip(SEAMS, functions, strict=True):
            setattr(place, name, function)
        for hooks, all_hooks in zip(self.hooks, self.hooked, strict=True):
            hooks.clear()
            hooks.update(all_hooks if on else {})
        attach._sampler.stop()
        attach._loop.reset()
        if on:
            attach._sampler = stack_sampler.StackSampler(self.recorder)

    def told(self) -> tuple[int, int]:
        return self.recorder.events, self.recorder.cost_ns()


def batches(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def event_ns(batches: int = 50, events: int = 1000) -> list[float]:
    """Nanoseconds of an event with its two readings of the clock, in batches."""
    recorder, times = Recorder(0, 1), []
    for _ in range(batches):
        start = time.thread_time_ns()
        for _ in range(events):
            recorder.event(State.FORWARD, now(), now())
        times.append((time.thread_time_ns() - start) / events)
    return times


def main(path: str, warmup: int, steps: int, batch: int, blocks: list[str]) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    recording = Recording()
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64 * batch * dist.get_world_size(), 512)
    data = TensorDataset(x, x[:, :16].sin())
    train = batches(DataLoader(data, batch, sampler=DistributedSampler(data)))
    results = []
    for name in ["recorded", "profiler", *blocks]:  # the first two warm up, and are left out
        on = name == "recorded"
        recording.switch(on)
        ddp = DistributedDataParallel(model, process_group=world if on else world.inner)
        profiling = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        stamps, told = [], (0, 0)
        with profiling if name == "profiler" else contextlib.nullcontext():
            for step, (x, y) in enumerate(itertools.islice(train, warmup + steps + 1)):
                if step == warmup:
                    told = recording.told()
                stamps.append((time.monotonic_ns(), time.thread_time_ns()))
                loss = mse_loss(ddp(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        events, cost = (b - a for a, b in zip(told, recording.told(), strict=True))
        pairs = list(itertools.pairwise(stamps[warmup:]))
        results.append(
            {
                "name": name,
                "wall_us": [(b[0] - a[0]) // 1000 for a, b in pairs],
                "cpu_us": [(b[1] - a[1]) // 1000 for a, b in pairs],
                "events": events / (steps + 1),
                "told_us": cost / 1000 / (steps + 1),
            }
        )
        del ddp, loss
        gc.collect()  # its reducer must not see the next block's gradients
    recording.switch(True)
    whole = {"blocks": results[2:], "event_ns": event_ns()}
    Path(f"{path}.{rank}").write_text(json.dumps(whole))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:5]), json.loads(sys.argv[5]))
