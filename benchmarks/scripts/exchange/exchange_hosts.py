"""Ranks of benchmarks/exchange/exchange_hosts.py: all-reduces over gloo and over Paceline in
turns, and how much of DDP's exchange its backward hides. Rank 0 writes what was found to FILE.

    exchange_hosts.py FILE --sizes N ... --rounds N [--cyclic] [--overlap --layers N]
"""

import argparse
import json
import os
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("file")
parser.add_argument("--sizes", type=int, nargs="*", default=[])
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--cyclic", action="store_true", help="ranks alternate between hosts")
parser.add_argument("--overlap", action="store_true")
parser.add_argument("--layers", type=int, default=48, help="of the overlap's model, of 1 MiB each")
args = parser.parse_args()
if args.cyclic:  # as srun --distribution=cyclic places them; before torch looks
    rank, per_host = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = int(os.environ["WORLD_SIZE"]) // per_host
    os.environ["RANK"] = str(rank % per_host * hosts + rank // per_host)

import torch  # noqa: E402  after RANK is set
import torch.distributed as dist  # noqa: E402  after RANK is set
from torch import nn  # noqa: E402  after RANK is set
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402, N817  usual name

import paceline  # noqa: E402, F401  the backend

LEAST_S = 0.05  # of one measurement
WIDTH = 512  # of the model: 1 MiB a layer
BUCKETS = (1, 2, 4, 25)  # MiB
STEPS = 2  # of one measurement

dist.init_process_group("gloo")
torch.set_num_threads(1)
GROUPS = {"gloo": dist.group.WORLD, "paceline": dist.new_group(backend="paceline")}


def slowest(seconds: float) -> float:
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def timed(what, times: int) -> float:
    """Seconds of one, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        what()
    return slowest(time.perf_counter() - start) / times


def by_size(nbytes: int) -> dict[str, list[float]]:
    x = torch.ones(nbytes // 4)
    ways = {
        name: lambda group=group: dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
        for name, group in GROUPS.items()
    }
    times = {name: max(1, round(LEAST_S / timed(way, 2))) for name, way in ways.items()}
    found = {name: [] for name in ways}
    for turn in range(args.rounds):
        for name in sorted(ways, reverse=turn % 2 == 1):
            found[name].append(timed(ways[name], times[name]))
    return found


def busy() -> tuple[int, int]:
    """Ticks that this machine's cores computed, and all of them."""
    with open("/proc/stat") as file:
        told = [int(one) for one in file.readline().split()[1:9]]
    return sum(told) - told[3] - told[4], sum(told)  # without idle and waiting for disks


def overlap() -> dict[str, list[float]]:
    """Of each group and size of buckets, the share of the exchange that is hidden: in each round a
    batch is as large as makes the backward as long as the exchange. Where each rank has one core,
    what the exchange itself computes ("busy", of its time) can't be hidden."""
    torch.manual_seed(0)

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(args.layers)))

    gradients = torch.ones(WIDTH * WIDTH * args.layers)
    exchange = {
        name: lambda group=group: dist.all_reduce(gradients, group=group)
        for name, group in GROUPS.items()
    }
    x = torch.randn(128, WIDTH)

    def steps(net: nn.Module):
        def one() -> None:
            net.zero_grad(set_to_none=False)
            net(x).square().mean().backward()

        return one

    alone = steps(model())

    def as_long() -> None:
        """The batch that makes a backward (two thirds of a step) as long as the exchange."""
        nonlocal x
        wanted, has = timed(exchange["paceline"], STEPS), timed(alone, STEPS) * 2 / 3
        x = torch.randn(max(16, round(len(x) * wanted / has)), WIDTH)

    as_long()
    ways = {
        f"{name} {bucket}": steps(
            DDP(model(), process_group=group, bucket_cap_mb=bucket, gradient_as_bucket_view=True)
        )
        for name, group in GROUPS.items()
        for bucket in BUCKETS
    }
    for way in ways.values():
        timed(way, STEPS)
    found = {name: [] for name in ways}
    more = {name: [] for name in ("batch", "backward_s", "exchange_s", "busy")}
    for turn in range(args.rounds):
        as_long()
        own = timed(alone, STEPS)
        each = {"gloo": timed(exchange["gloo"], STEPS)}
        before = busy()
        each["paceline"] = timed(exchange["paceline"], STEPS)
        computed, all_ticks = (now - then for now, then in zip(busy(), before, strict=True))
        told = len(x), own * 2 / 3, each["paceline"], computed / max(all_ticks, 1)
        for name, one in zip(more, told, strict=True):
            more[name].append(one)
        for name in sorted(ways, reverse=turn % 2 == 1):
            took, whole = timed(ways[name], STEPS), each[name.partition(" ")[0]]
            found[name].append((own + whole - took) / whole)
    return found | more


found = {str(nbytes): by_size(nbytes) for nbytes in args.sizes}
if args.overlap:
    found["overlap"] = overlap()
if dist.get_rank() == 0:
    with open(args.file, "w") as file:
        json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
