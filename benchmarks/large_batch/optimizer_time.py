"""Claim: a step of LARS takes at most 1.3 times one of SGD with momentum, and one of LAMB at most
1.6 times one of AdamW: both of PyTorch, foreach, with weight decay, on the same parameters.

Parameters are those of a CNN (many tensors) and of an MLP (large tensors). Gradients are fixed.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import console, finish, options, ratio, rounds, run, spread, target
from rich.table import Table
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from paceline.optim import LAMB, LARS

Make = Callable[[Any], Optimizer]
PAIRS: dict[str, tuple[Make, Make, float]] = {
    "LARS / SGD": (
        lambda p: LARS(p, 0.1, momentum=0.9, weight_decay=1e-4),
        lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=1e-4, foreach=True),
        1.3,
    ),
    "LAMB / AdamW": (
        lambda p: LAMB(p, 1e-3, weight_decay=0.01),
        lambda p: AdamW(p, 1e-3, weight_decay=0.01, foreach=True),
        1.6,
    ),
}


def cnn() -> nn.Module:
    widths = [64] * 12 + [128] * 12 + [256] * 8
    layers: list[nn.Module] = []
    for before, after in zip([3, *widths], widths, strict=False):
        layers += [nn.Conv2d(before, after, 3), nn.BatchNorm2d(after)]
    return nn.Sequential(*layers)


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))


def optimizer(make: Make, build: Callable[[], nn.Module], device: str) -> Optimizer:
    torch.manual_seed(0)
    model = build().to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return make(model.parameters())


def duration(step: Optimizer, count: int, device: str) -> float:
    """Return the mean duration of a step, in s."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def main() -> None:
    parser = options("optimizer_time", __doc__ or "", repeats=15)
    parser.add_argument("--steps", type=int, default=5, help="steps of a round, default 5")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("parameters", "optimizers", "step, ms", "peer's step, ms", "ratio")
    measured: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    targets = []
    for build in (cnn, mlp):
        for name, (ours, peer, limit) in PAIRS.items():
            each = {
                kind: optimizer(make, build, args.device)
                for kind, make in (("ours", ours), ("peer", peer))
            }
            times: dict[str, list[float]] = {kind: [] for kind in each}
            for step in each.values():
                duration(step, 2, args.device)  # the first one allocates the state
            for order in rounds(list(each), args.repeats):
                for kind in order:
                    times[kind].append(duration(each[kind], args.steps, args.device))
            what = f"{build.__name__}, {name}"
            measured[what] = times
            ratios[what] = ratio(times["ours"], times["peer"])
            targets.append(target(what, limit, ratios[what]))
            of = [f"{1e3 * spread(times[kind])['median']:.2f}" for kind in ("ours", "peer")]
            table.add_row(build.__name__, name, *of, f"{ratios[what]['median']:.2f}")
    console.print(table)
    medians = {
        f"{what}, {kind}": spread(times)
        for what, of in measured.items()
        for kind, times in of.items()
    }
    finish(args, measured, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
