"""Ranks of benchmarks/compat/horovod.py: steps with DDP and with Horovod's interface, alternately.

Both train the same model in the same process, on the same process group. Each block has ``steps``
steps after ``warm_up`` more; its time is the median step of the slowest rank. Rank 0 writes the
times of all blocks. Under real Horovod (``--alone``) only its own blocks run.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn


def digits():
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(32, 1, 8, 8)


def mlp():
    """20 MB of parameters in six tensors."""
    layers = [nn.Linear(256, 1450), nn.ReLU(), nn.Linear(1450, 2900), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2900, 128)), torch.randn(16, 256)


def small_tensors():
    """A convolutional network with 150 small tensors."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(37):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(4, 3, 8, 8)


MODELS = {"digits": digits, "mlp": mlp, "small tensors": small_tensors}


class Training:
    """A model with its optimizer, by DDP or by Horovod."""

    def __init__(self, name: str, kind: str) -> None:
        torch.manual_seed(0)
        self.model, self.batch = MODELS[name]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(
                self.model, gradient_as_bucket_view=True
            )
        else:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=self.model.named_parameters()
            )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def median_s(call, count: int, name: str) -> float:
    """Return the median time of a call, of the slowest rank."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    found = torch.tensor([statistics.median(times)], dtype=torch.float64)
    return float(hvd.allgather(found, name=name).max())


def coordination_s(count: int) -> float:
    """Return the time that an all-reduce takes longer than that of torch.distributed."""
    tensor = torch.ones(4)
    plain = median_s(lambda: torch.distributed.all_reduce(tensor), count, "plain")
    named = median_s(lambda: hvd.allreduce_(tensor, name="cached"), count, "named")
    return named - plain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    kinds = ["horovod"] if args.alone else ["ddp", "horovod"]
    found: dict[str, dict[str, list[float]]] = {}
    for name in MODELS:
        trainings = {kind: Training(name, kind) for kind in kinds}
        found[name] = {kind: [] for kind in kinds}
        for training in trainings.values():  # buckets and the cache are settled from here on
            for _ in range(args.warm_up):
                training.step()
        for number in range(args.rounds):
            for kind in kinds[:: -1 if number % 2 else 1]:
                for _ in range(args.warm_up):
                    trainings[kind].step()
                seconds = median_s(trainings[kind].step, args.steps, f"{name} {kind}")
                found[name][kind].append(seconds)
    waits = [] if args.alone else [coordination_s(10 * args.steps) for _ in range(args.rounds)]
    if hvd.rank() == 0:
        args.out.write_text(json.dumps({"steps_s": found, "coordination_s": waits}))


if __name__ == "__main__":
    main()
