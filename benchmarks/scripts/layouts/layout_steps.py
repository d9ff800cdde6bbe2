"""Train one model in each layout, in turns; rank 0 writes times and memory as JSON.

The batch is chosen so that computing takes EXCHANGES times as long as an all-reduce of the
gradients.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paceline

EXCHANGES = 8
MAX_BATCH = 4096


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", nargs="+", default=["data", "zero1", "zero2", "zero3"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=0)
    args = parser.parse_args()
    world = paceline.init(progress=False)
    plain = build(args)
    count = sum(parameter.numel() for parameter in plain.parameters())
    exchange_s = timed_exchange(count)
    batch = args.batch or calibrated_batch(plain, args.width, exchange_s)
    del plain
    x = torch.randn(batch, args.width)
    trained, memory = {}, {}
    for layout in args.layouts:
        resident = resident_bytes()
        model = build(args)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        trained[layout] = world.distribute(model, optimizer, layout=layout)
        reset_peak()
        for _ in range(2):
            step(world, *trained[layout], x)
        memory[layout] = peak_bytes() - resident
    times: dict[str, list[float]] = {layout: [] for layout in args.layouts}
    for number in range(args.rounds):
        for layout in args.layouts[:: -1 if number % 2 else 1]:
            step(world, *trained[layout], x)
            dist.barrier()
            start = time.perf_counter()
            step(world, *trained[layout], x)
            times[layout].append(time.perf_counter() - start)
    if world.rank == 0:
        found = {
            "parameters": count,
            "batch": batch,
            "exchange_s": exchange_s,
            "step_s": times,
            "peak_bytes": memory,
        }
        args.out.write_text(json.dumps(found))


def build(args: argparse.Namespace) -> nn.Module:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU())

    return nn.Sequential(*(layer() for _ in range(args.depth)))


def step(world: paceline.World, model: nn.Module, optimizer: torch.optim.Adam, x: torch.Tensor):
    world.backward(model(x).square().mean())
    world.step(optimizer)


def timed_exchange(count: int) -> float:
    gradients = torch.ones(count)
    dist.all_reduce(gradients)
    times = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(gradients)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def calibrated_batch(model: nn.Module, width: int, exchange_s: float) -> int:
    probe = torch.randn(64, width)
    model(probe).square().mean().backward()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model(probe).square().mean().backward()
        times.append(time.perf_counter() - start)
    wanted = torch.tensor(64 * EXCHANGES * exchange_s / min(times))
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    return max(1, min(MAX_BATCH, int(wanted)))


def _status(name: str) -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) * 1024


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
