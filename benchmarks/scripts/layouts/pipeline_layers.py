"""Steps of a stack of equal layers, in one process or in a pipeline of two stages.

Arguments: JSON with "name" ("one process", "both cores", or a schedule and a number of
micro-batches), number and "width" of the "layers", "samples" of a batch and "steps". Rank 0 prints
the median seconds of a step. With "both cores" two ranks train a model each, without exchange.
"""

import json
import statistics
import sys
import time

import torch
from torch import nn

import paceline


def main() -> None:
    what = json.loads(sys.argv[1])
    world = paceline.init(seed=1, progress=False, record=False)
    width, samples = what["width"], what["samples"]
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(what["layers"]))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(samples, width)
    layout = "data"
    if what["name"] == "both cores":
        report(world, [plain_step(model, optimizer, x) for _ in range(what["steps"] + 2)])
        return
    if what["name"] != "one process":
        schedule, count = what["name"].split()
        layout = f"pp2 + schedule={schedule} + micro-batches={count}"
        balance = {"balance": "operations", "example_inputs": x[: samples // int(count)]}
        model, optimizer = world.distribute(model, optimizer, layout=layout, **balance)
    else:
        model, optimizer = world.distribute(model, optimizer, layout=layout)
    found = []
    for _ in range(what["steps"] + 2):
        start = time.monotonic()
        world.forward_backward(model, x, x, loss=nn.functional.mse_loss)
        world.step(optimizer)
        found.append(time.monotonic() - start)
    report(world, found)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Return the seconds of a step of one rank alone."""
    start = time.monotonic()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.monotonic() - start


def report(world: paceline.World, found: list[float]) -> None:
    if world.rank == 0:
        print(f"seconds {statistics.median(found[2:])}", flush=True)


main()
