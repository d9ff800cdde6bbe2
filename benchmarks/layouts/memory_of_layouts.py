"""Compare the predicted memory of a rank in each layout with the peak of PyTorch's CPU allocator.

    paceline run -n 2 benchmarks/layouts/memory_of_layouts.py

Two models, Adam, batches of 8. Each layout is built by ``world.distribute``, takes a step that
creates the optimizer's states, and is measured over two steps. What the rank holds before these
(shards, states, DDP's buckets) is added from the tensors. Prints JSON on rank 0: predicted bytes,
measured bytes of the rank with the largest peak, and their ratio.
"""

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.parallel.memory.choose import predict_setup
from paceline.parallel.memory.measure import measure_growth
from paceline.parallel.memory.setup import ForwardInputs, ModelSetup
from paceline.world.layouts.tensor_bytes import tensor_bytes

LAYOUTS = ("data", "zero1", "zero2", "zero3")
BATCH = 8
Build = Callable[[], tuple[nn.Module, torch.Tensor]]


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Build an encoder of eight blocks with 6.3 million parameters."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    return model, torch.randn(BATCH, 64, 256)


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """Build eight blocks with 8.4 million parameters, and few activations."""
    blocks = [
        nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(8)
    ]
    return nn.Sequential(*blocks), torch.randn(BATCH, 512)


def main() -> None:
    """Print one JSON object."""
    world = paceline.init(progress=False, record=False)
    rows = [
        _row(world, build, layout, recompute)
        for build in (transformer, perceptron)
        for recompute in (None, "blocks")
        for layout in LAYOUTS
    ]
    if world.rank == 0:
        print(json.dumps({"ranks": world.size, "layouts": rows}, indent=1))


def _row(
    world: paceline.World, build: Build, layout: str, recompute: str | None
) -> dict[str, object]:
    model, x = build()
    optimizer = torch.optim.Adam(model.parameters())
    setup = ModelSetup(model, optimizer, torch.device("cpu"))
    (predicted,) = [
        one
        for one in predict_setup(setup, ForwardInputs((x,)), world.size)
        if (one.layout, one.recompute) == (layout, recompute)
    ]
    model, optimizer = world.distribute(model, optimizer, layout=layout, recompute=recompute)

    def step() -> None:
        world.backward(model(x).square().mean())
        world.step(optimizer)

    def steps() -> None:
        step()
        step()

    step()
    held = tensor_bytes([model], [optimizer], [layout], None)
    buckets = held["gradients"] if layout == "data" else 0
    before = held["parameters"] + held["buffers"] + held["optimizer_states"] + buckets + x.nbytes
    found = before + measure_growth(steps)
    peaks = [0] * world.size
    dist.all_gather_object(peaks, found)
    return {
        "model": build.__name__,
        "layout": predicted.name,
        "predicted_bytes": predicted.memory.total,
        "measured_bytes": max(peaks),
        "ratio": round(predicted.memory.total / max(peaks), 4),
        "peak": predicted.place,
    }


if __name__ == "__main__":
    main()
