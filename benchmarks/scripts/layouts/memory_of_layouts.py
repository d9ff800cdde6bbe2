"""Rows of memory_of_layouts.py: FILE MODEL ...; rank 0 writes JSON.

Each layout is built by ``world.distribute``, takes a step that creates the optimizer's states, and
is measured over two steps. What the rank holds before these (shards, states, DDP's buckets) is
added from the tensors.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocator_peak import measure_growth
from torch import nn

import paceline
from paceline.cost.layout import Layout
from paceline.cost.layout_memory import (
    LAYOUTS,
    StepMemory,
    predict_layout,
)
from paceline.parallel.memory.choose import trace_model
from paceline.parallel.memory.setup import ForwardInputs, ModelSetup
from paceline.world.layouts.distribution import tensor_bytes

BATCH = 8
# Adam's bytes a parameter by sharding level: whole on each rank, and divided (arXiv 1910.02054).
ADAM_BYTES = ((16, 0), (8, 8), (4, 12), (0, 16))
Build = Callable[[], tuple[nn.Module, torch.Tensor]]


class Residual(nn.Module):
    """A block of convolutions, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the input's size."""
        out: torch.Tensor = x + self.second(self.first(x).relu())
        return out


class Language(nn.Module):
    """A decoder with a table of tokens that is not tied to its last layer."""

    def __init__(self, tokens: int, width: int, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.last = nn.Linear(width, tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score of each token at each position."""
        out: torch.Tensor = self.last(self.layers(self.table(x)))
        return out


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Build an encoder of eight blocks with 6.3 million parameters."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    return model, torch.randn(BATCH, 32, 256)


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """Build twelve blocks with 6.3 million parameters, and few activations."""
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(12)]
    return nn.Sequential(*blocks), torch.randn(BATCH, 512)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Build twelve residual blocks with 3.5 million parameters."""
    return nn.Sequential(*(Residual(128) for _ in range(12))), torch.randn(BATCH, 128, 8, 8)


def language() -> tuple[nn.Module, torch.Tensor]:
    """Build a decoder with 7.3 million parameters, a sixth of them in its table."""
    return Language(5000, 256, 6), torch.randint(5000, (BATCH, 32))


MODELS: tuple[Build, ...] = (transformer, perceptron, convolutions, language)


def main() -> None:
    world = paceline.init(progress=False, record=False)
    out, names = Path(sys.argv[1]), sys.argv[2:]
    rows = []
    for build in MODELS:
        if not names or build.__name__ in names:
            traced = _trace(build)
            rows += [_row(world, build, traced, layout) for layout in LAYOUTS]
    if world.rank == 0:
        out.write_text(json.dumps(rows))


def _trace(build: Build) -> StepMemory:
    model, x = build()
    setup = ModelSetup(model, torch.optim.Adam(model.parameters()), torch.device("cpu"))
    return trace_model(setup, ForwardInputs((x,)))


def _row(world: paceline.World, build: Build, traced: StepMemory, layout: Layout) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = build()
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    predicted = predict_layout(traced, layout, world.size)
    activations = max(one.memory.activations + one.memory.temporary for one in traced.samples)
    model, optimizer = world.distribute(model, optimizer, layout=layout)

    def step() -> None:
        world.backward(model(x).float().square().mean())
        world.step(optimizer)

    def steps() -> None:
        step()
        step()

    step()
    held = tensor_bytes(world._training.models[-1:], [optimizer], [str(layout)], None)
    buckets = held["gradients"] if not layout.zero else 0
    before = held["parameters"] + held["buffers"] + held["optimizer_states"] + buckets + x.nbytes
    peaks = [0] * world.size
    dist.all_gather_object(peaks, before + measure_growth(steps))
    whole, sharded = ADAM_BYTES[layout.zero]
    return {
        "model": build.__name__,
        "layout": str(layout),
        "parameters": count,
        "rule_bytes": int((whole + sharded / world.size) * count),
        "activation_bytes": activations,
        "block_bytes": 0 if not layout.zero else max(traced.blocks.values()),
        "predicted_bytes": predicted.memory.total,
        "measured_bytes": max(peaks),
        "peak": predicted.place,
    }


if __name__ == "__main__":
    main()
