"""Train with one implementation of ZeRO: FILE NAME WIDTH BATCH; rank 0 writes seconds a step.

Paceline is not imported for others, which may be in an environment without it.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BLOCKS = 8
WARM, STEPS = 3, 12


def main() -> None:
    out, name, width, batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    prepare, build = {
        "paceline": (start_paceline, with_paceline),
        "deepspeed": (start_deepspeed, with_deepspeed),
        "megatron-fsdp": (start_gloo, with_megatron),
    }[name]
    shared = prepare()
    x = torch.randn(batch, width)
    found = {}
    for level in (1, 2, 3):
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(BLOCKS))
        step = build(shared, nn.Sequential(*layers), level, x)
        for _ in range(WARM):
            step()
        times = []
        for _ in range(STEPS):
            dist.barrier()
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        found[f"zero{level}"] = statistics.median(times)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()


def start_paceline() -> Any:
    import paceline

    return paceline.init(progress=False, record=False)


def with_paceline(world: Any, model: nn.Module, level: int, x: torch.Tensor) -> Callable[[], None]:
    adam = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    sharded, optimizer = world.distribute(model, adam, layout=f"zero{level}")

    def step() -> None:
        world.backward(sharded(x).square().mean())
        world.step(optimizer)

    return step


def start_deepspeed() -> Any:
    import deepspeed

    deepspeed.init_distributed("gloo")
    return deepspeed


def with_deepspeed(
    deepspeed: Any, model: nn.Module, level: int, x: torch.Tensor
) -> Callable[[], None]:
    adam = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    settings = {
        "train_micro_batch_size_per_gpu": len(x),
        "zero_optimization": {"stage": level},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = deepspeed.initialize(model=model, optimizer=adam, config=settings)[0]

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


def start_gloo() -> None:
    dist.init_process_group("gloo")


def with_megatron(_: Any, model: nn.Module, level: int, x: torch.Tensor) -> Callable[[], None]:
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    sharded = fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="shard",
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=level,
        device=torch.device("cpu"),
    )
    adam = torch.optim.Adam(sharded.parameters(), lr=1e-4, fused=True)
    optimizer = fully_shard_optimizer(adam)

    def step() -> None:
        optimizer.zero_grad()
        sharded(x).square().mean().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
