"""Ranks of benchmarks/exchange/tuning.py: a plain DDP script that trains so many steps; or, with
--sweep, one that measures every bucket size with every way of exchange, and then the best of
them, what the tuner has chosen and the default in turns. Rank 0 writes what was found to FILE.

    tuning.py FILE MODEL --steps N
    tuning.py FILE MODEL --sweep --tuned SETTINGS --rounds N [--each N]
"""

import argparse
import json
import tomllib
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("model", choices=("small layers", "large layers", "convolutions"))
parser.add_argument("--steps", type=int, default=0)
parser.add_argument("--sweep", action="store_true")
parser.add_argument("--tuned", type=Path)
parser.add_argument("--rounds", type=int, default=7, help="of the comparison at the end")
parser.add_argument("--each", type=int, default=20, help="steps of each setting of the sweep")
args = parser.parse_args()

SIZES = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 25)  # MiB
TURNS = 2  # in which a setting has its steps


def made() -> tuple[nn.Module, torch.Tensor]:
    """The model, and a batch."""
    torch.manual_seed(0)
    if args.model == "small layers":  # 60 of 64 KiB
        return chain(60, 128), torch.randn(256, 128)
    if args.model == "large layers":  # 4 of 1 MiB
        return chain(4, 512), torch.randn(256, 512)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for wide in (32, 64, 128, 256):  # most of the bytes are in the last one
        layers += [nn.Conv2d(wide, 2 * wide, 3, padding=1, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10)), torch.randn(4, 3, 32, 32)


def chain(layers: int, width: int) -> nn.Module:
    each = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*each)


dist.init_process_group("gloo")
torch.set_num_threads(1)
net, x = made()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)


def step() -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


for _ in range(args.steps):
    step()

if args.sweep:
    from paceline.comm.tune import algorithms
    from paceline.comm.tune.choice import ExchangeSettings
    from paceline.comm.tune.successive_halving import WARM_UP_STEPS
    from paceline.comm.tune.tuner import BucketRebuilder

    group, cpu = model.process_group, torch.device("cpu")
    over, buckets = algorithms.ExchangeMethods(group), BucketRebuilder(model)
    for _ in range(3):
        step()

    def measured(choice: ExchangeSettings, steps: int) -> list[float]:
        """Seconds of each, without those in which DDP makes its buckets anew."""
        buckets.rebuild(choice.mib)
        over.set(choice.method)
        told = [algorithms.time_once(step, cpu) for _ in range(WARM_UP_STEPS + steps)]
        return told[WARM_UP_STEPS:]

    whole = sum(one.numel() for one in model.parameters()) * 4 / 2**20
    sizes = [size for size in SIZES if size < whole] + [round(1.01 * whole + 0.01, 2)]
    choices = [ExchangeSettings(size, way) for size in sizes for way in over.all]
    found = {choice: [] for choice in choices}
    each = max(1, args.each // TURNS - WARM_UP_STEPS)
    for turn in range(TURNS):
        for choice in reversed(choices) if turn % 2 else choices:
            found[choice] += measured(choice, each)
    medians = {
        choice: algorithms.max_over_ranks(median(told), group, cpu)
        for choice, told in found.items()
    }
    best = min(medians, key=medians.__getitem__)
    tuned = ExchangeSettings.from_knobs(tomllib.loads(args.tuned.read_text())["knobs"])
    compared = {"best": best, "tuned": tuned, "default": ExchangeSettings(None, "gloo")}
    turns = {name: [] for name in compared}
    for turn in range(args.rounds):
        for name in sorted(compared, reverse=turn % 2 == 1):
            choice = compared[name] if compared[name].method else compared["default"]
            told = median(measured(choice, each))
            turns[name].append(algorithms.max_over_ranks(told, group, cpu))
    if dist.get_rank() == 0:
        said = {
            "steps": len(choices) * TURNS * (each + WARM_UP_STEPS),
            "settings": len(choices),
            "choices": {name: str(choice) for name, choice in compared.items()},
            "sweep": {str(choice): seconds for choice, seconds in medians.items()},
            "seconds": turns,
        }
        args.file.write_text(json.dumps(said))
dist.barrier()
dist.destroy_process_group()
