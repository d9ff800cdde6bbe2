"""Rows of pipeline_memory.py: FILE LAYOUT MODEL ...; rank 0 writes JSON.

Each model is divided by ``world.distribute``, takes a step that creates the optimizer's states, and
is measured over two steps. What the rank holds before these is added from the tensors.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocator_peak import measure_growth
from memory_of_layouts import MODELS, Build

import paceline
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.world.layouts.distribution import tensor_bytes

MICRO_BATCHES = 4
SAMPLES = 64  # of a batch: 16 of a micro-batch, which are computed to measure the costs


def main() -> None:
    world = paceline.init(progress=False, record=False)
    out, layout, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    rows = []
    for build in MODELS:
        if not names or build.__name__ in names:
            rows += _rows(world, build, layout)
    if world.rank == 0:
        out.write_text(json.dumps(rows))


def _rows(world: paceline.World, build: Build, layout: str) -> list[dict[str, Any]]:
    """Return a row for each stage."""
    torch.manual_seed(0)
    model, few = build()
    x = few.repeat(SAMPLES // len(few), *[1] * (few.dim() - 1))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = world.distribute(
        model,
        optimizer,
        layout=f"{layout} + micro-batches={MICRO_BATCHES}",
        example_inputs=x[: SAMPLES // MICRO_BATCHES],
    )
    divided = world._training.models[-1]
    assert isinstance(divided, PipelineModel)

    def step() -> None:
        world.forward_backward(model, x, x, loss=lambda y, _: y.float().square().mean())
        world.step(optimizer)

    def steps() -> None:
        step()
        step()

    step()
    held = tensor_bytes([divided], [optimizer], [layout], None)
    before = held["parameters"] + held["buffers"] + held["optimizer_states"] + x.nbytes
    peaks = [0] * world.size
    dist.all_gather_object(peaks, before + measure_growth(steps))
    return [
        {
            "model": build.__name__,
            "layout": layout,
            "stage": stage,
            # inputs are on all ranks
            "predicted_bytes": predicted + x.nbytes,
            "measured_bytes": max(peaks[rank] for rank in world.mesh.ranks_along(("data",), first)),
        }
        for stage, predicted in enumerate(divided.predicted_bytes)
        for first in world.mesh.ranks_along(("stage",))[stage : stage + 1]
    ]


if __name__ == "__main__":
    main()
