"""Steps of three models, alone and in DDP that exchanges nothing, over gloo, and over shared
memory, in turns in one job.
Arguments: file, rounds, steps a round. What is written: by model and way the processor's and the
clock's seconds of a step, of each round, of rank 0."""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline  # noqa: F401  makes the backend known

WAYS = {  # name: backend, whether gradients are views of the buckets
    "alone": None,
    "nothing exchanged": ("gloo", True),
    "gloo": ("gloo", False),
    "gloo, views": ("gloo", True),
    "paceline, views": ("paceline", True),
}


def perceptron(width: int, layers: int) -> nn.Module:
    inner = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*inner, nn.Linear(width, 10))


class Bottleneck(nn.Module):
    """Of ResNet-50 (He et al., arXiv 1512.03385)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.short = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet50() -> nn.Module:
    start = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers: list[nn.Module] = [*start, nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width, stride = 64 << stage, 2 if stage and not block else 1
            layers.append(Bottleneck(inputs, width, stride))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


MODELS = {  # name: the model, and the shape of a batch
    "MLP, many small tensors": (lambda: perceptron(128, 60), (128, 128)),
    "MLP, large tensors": (lambda: perceptron(2048, 4), (128, 2048)),
    "ResNet-50": (resnet50, (4, 3, 96, 96)),
}


def main(path: str, rounds: int, steps: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "paceline")}
    found = {}
    for name, (make, shape) in MODELS.items():
        torch.manual_seed(0)
        x = torch.randn(shape)
        loops = {way: looped(way, make(), x, groups) for way in WAYS}
        for loop in loops.values():
            loop(3)
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for at in range(rounds):
            for way in [*WAYS][at % len(WAYS) :] + [*WAYS][: at % len(WAYS)]:
                dist.barrier()
                times[way].append(loops[way](steps))
        found[name] = times
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(found, file)
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()


def as_it_is(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def looped(way: str, net: nn.Module, x: torch.Tensor, groups: dict):
    model = net
    if WAYS[way] is not None:
        backend, views = WAYS[way]
        model = DistributedDataParallel(
            net, process_group=groups[backend], gradient_as_bucket_view=views
        )
        if way == "nothing exchanged":
            model.register_comm_hook(None, as_it_is)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def loop(steps: int) -> tuple[float, float]:
        busy, start = time.process_time(), time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return (time.process_time() - busy) / steps, (time.perf_counter() - start) / steps

    return loop


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
