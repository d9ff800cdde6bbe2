"""Steps of a convolutional network with batch norms of each kind, for
benchmarks/large_batch/norm_time.py. Arguments: file (the rank's number is added), steps of a block,
samples of a rank, and the kinds of each block as JSON.
"""

import json
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import paceline

CHANNELS = (3, 16, 16, 32, 32, 64, 64)
LAYERS = len(CHANNELS) - 1
calls: Counter[str] = Counter()


def counted(name: str) -> None:
    """Count the calls of a collective that Python code starts: DDP's are not among them."""
    function = getattr(dist, name)

    def call(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return function(*args, **options)

    setattr(dist, name, call)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(CHANNELS)):
        stride = 2 if number % 2 else 1
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def main(path: str, steps: int, batch: int, blocks: list[str]) -> None:
    world = paceline.init()
    for name in ("all_gather", "all_reduce"):
        counted(name)
    trained = {}
    for kind in dict.fromkeys(blocks):
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        trained[kind] = world.distribute(model, optimizer, norm=kind.partition(" ")[0])
    found = []
    for kind in [*trained, *blocks]:  # the first ones warm up, and are left out
        model, optimizer = trained[kind]
        uneven = kind.endswith("uneven") and world.rank
        x = torch.randn(batch * 3 // 4 if uneven else batch, 3, 24, 24)
        y = torch.zeros(len(x), dtype=torch.long)
        calls.clear()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
        each = sum(calls.values()) / steps / LAYERS
        found.append({"kind": kind, "s": times, "exchanges_a_layer": each, "calls": dict(calls)})
        dist.barrier()
    Path(f"{path}.{world.rank}").write_text(json.dumps(found[len(trained) :]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
