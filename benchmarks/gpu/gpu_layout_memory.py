"""Claim: the predicted peak memory of a step on a GPU is within 10 % of the measured one.

Five models in each layout that one rank can have: data, and zero1, zero2 and zero3 on a mesh of one
rank. Measured is the peak of PyTorch's allocator on the GPU; workspace of the libraries is
allocated before.
"""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed as dist
from common import console, finish, new_table, run, target, with_rounds
from on_device import device_options, facts, peak_of
from torch import nn

from paceline.cost.layout import Layout
from paceline.cost.layout_memory import LAYOUTS, StepMemory, predict_layout
from paceline.parallel.memory.choose import trace_model
from paceline.parallel.memory.setup import ForwardInputs, ModelSetup
from paceline.parallel.mesh import Mesh
from paceline.parallel.sharded.fully_sharded import shard_model
from paceline.parallel.sharded.layouts import parse_request
from paceline.parallel.strategy.distributed_model import DistributedModel

LIMIT = 1.10
Build = Callable[[int], tuple[nn.Module, torch.Tensor]]


class Residual(nn.Module):
    """A block of convolutions, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.norm(self.first(x)).relu())


class Language(nn.Module):
    """A decoder with a table of tokens."""

    def __init__(self, tokens: int, width: int, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.last = nn.Linear(width, tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.table(x)))


class Recurrent(nn.Module):
    """An LSTM of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cell(x)[0])


def perceptron(size: int) -> tuple[nn.Module, torch.Tensor]:
    blocks = [nn.Sequential(nn.Linear(size, size), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*blocks), torch.randn(4 * size, size)


def transformer(size: int) -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(size, 8, 4 * size, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(8, 128, size)


def convolutions(size: int) -> tuple[nn.Module, torch.Tensor]:
    width = size // 8
    return nn.Sequential(*(Residual(width) for _ in range(4))), torch.randn(16, width, 32, 32)


def language(size: int) -> tuple[nn.Module, torch.Tensor]:
    return Language(8 * size, size, 2), torch.randint(8 * size, (8, 128))


def recurrent(size: int) -> tuple[nn.Module, torch.Tensor]:
    return Recurrent(size // 2), torch.randn(32, 64, size // 2)


MODELS: tuple[Build, ...] = (perceptron, transformer, convolutions, language, recurrent)


def main() -> None:
    parser = device_options("gpu_layout_memory", __doc__ or "", repeats=1)
    args = parser.parse_args()
    args.machine = facts(args.device)
    if args.device == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    size = 64 if args.quick else 1024
    began, rows, failed = time.perf_counter(), [], {}
    warm_up(args.device)
    for build in MODELS:
        traced = None
        for layout in LAYOUTS:
            if time.perf_counter() - began > args.seconds:
                failed[f"{build.__name__}, {layout}"] = "no time left"
                continue
            try:
                traced = traced or trace(build, size, args.device)
                rows.append(row(build, layout, size, args.device, traced))
            except Exception as error:  # the other rows are measured all the same
                failed[f"{build.__name__}, {layout}"] = f"{type(error).__name__}: {error}"[:500]
            gc.collect()
    dist.destroy_process_group()
    headings = ("model", "layout", "predicted, MiB", "measured, MiB", "predicted / measured")
    table = new_table(*headings, title="Peak memory of a step on the device")
    ratios: dict[str, Any] = {}
    targets = []
    for one in rows:
        name, value = f"{one['model']}, {one['layout']}", one["predicted_bytes"]
        share = value / one["measured_bytes"] if one["measured_bytes"] else 1.0
        ratios[name] = with_rounds([share])
        off = max(share, 1 / share)
        claim = f"{name}: prediction within 10 % of the measured peak"
        targets.append(target(claim, LIMIT, [off], counted=True))
        mib = (f"{n / (1 << 20):.1f}" for n in (value, one["measured_bytes"]))
        table.add_row(one["model"], one["layout"], *mib, f"{share:.3f}")
    console.print(table)
    for name, text in failed.items():
        console.print(f"{name}: {text}")
    measurements = {"rows": rows, "failed": failed}
    finish(args, measurements, {}, ratios, targets)


def warm_up(kind: str) -> None:
    """Let the libraries allocate their workspace."""
    x = torch.randn(256, 256, device=kind, requires_grad=True)
    (x @ x).sum().backward()
    nn.Conv2d(1, 8, 3).to(kind)(x.detach()[None, None]).sum().backward()


def trace(build: Build, size: int, kind: str) -> StepMemory:
    """Return the memory of a model's step, predicted without data."""
    model, x = build(size)
    optimizer = torch.optim.AdamW(model.parameters())
    return trace_model(ModelSetup(model, optimizer, torch.device(kind)), ForwardInputs((x,)))


def row(build: Build, layout: Layout, size: int, kind: str, traced: StepMemory) -> dict[str, Any]:
    """Return predicted and measured bytes of a model in a layout."""
    device = torch.device(kind)
    predicted = predict_layout(traced, layout, 1)
    gc.collect()
    before = torch.cuda.memory_allocated() if kind == "cuda" else 0
    torch.manual_seed(0)
    model, x = build(size)
    model, x = model.to(device), x.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    if layout.zero:
        request = parse_request(layout, None, kind, {})
        assert request is not None
        inner = DistributedModel(model)
        model = shard_model(inner, optimizer, device, request, Mesh(0, 1)).module

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    gc.collect()
    measured = max(peak_of(lambda: [step() for _ in range(2)], kind) - before, 0)
    return {
        "model": build.__name__,
        "layout": str(layout),
        "predicted_bytes": predicted.memory.total,
        "measured_bytes": measured,
        "peak": predicted.place,
    }


if __name__ == "__main__":
    run(main)
