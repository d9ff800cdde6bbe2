"""Ranks of benchmarks/exchange/unused.py: steps of one DDP model that searches for unused
parameters, one that does not, and one whose graph is static, in turns; and all-reduces of as
many bytes as ranks need to agree on which of N parameters were used. Rank 0 writes
what was found to FILE.

    unused.py FILE --rounds N --steps N --parameters N ...
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--parameters", type=int, nargs="+", default=[120])
args = parser.parse_args()

LAYERS, WIDTH = 60, 128
WAYS = {
    "plain": {},
    "search": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}

dist.init_process_group("gloo")
torch.set_num_threads(1)


def slowest(seconds: float) -> float:
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def timed(what: Callable[[], None], times: int) -> float:
    """The median of so many, on the slowest rank."""
    dist.barrier()
    each = []
    for _ in range(times):
        start = time.perf_counter()
        what()
        each.append(time.perf_counter() - start)
    return slowest(median(each))


def steps(options: dict[str, bool]) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), **options)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(64, WIDTH)

    def one() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return one


def agreeing(nbytes: int) -> Callable[[], None]:
    x = torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: dist.all_reduce(x, dist.ReduceOp.MAX)


ways = {name: steps(options) for name, options in WAYS.items()}
for count in args.parameters:  # an int32 each, as DDP's map has them; and a bit each
    ways |= {f"map {count}": agreeing(4 * count), f"bits {count}": agreeing(-(-count // 8))}
for way in ways.values():
    timed(way, 3)
found: dict[str, list[float]] = {name: [] for name in ways}
for turn in range(args.rounds):
    for name in sorted(ways, reverse=turn % 2 == 1):
        found[name].append(timed(ways[name], args.steps))
if dist.get_rank() == 0:
    args.file.write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
