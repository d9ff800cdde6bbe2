"""Train one model in one layout by Paceline or a peer; rank 0 writes step times and memory as JSON.

Only the one that trains is imported, so that the script also runs without Paceline. Its import is
not part of the memory.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
import torch.distributed as dist
from steps_memory import peak_bytes, reset_peak, resident_bytes
from torch import nn

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
Step = Callable[[torch.Tensor], None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("layout", choices=sorted(STAGES))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prepare = PEERS[args.peer]
    importlib.import_module(args.peer.replace("-", "_"))
    resident = resident_bytes()
    width = args.width
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(args.depth))
    step = prepare(nn.Sequential(*layers), args.layout)
    x = torch.randn(args.batch, args.width)
    reset_peak()
    for _ in range(2):
        step(x)
    times = []
    for _ in range(args.steps):
        dist.barrier()
        start = time.perf_counter()
        step(x)
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        found = {"step_s": times, "peak_bytes": peak_bytes() - resident}
        args.out.write_text(json.dumps(found))


def with_paceline(model: nn.Module, layout: str) -> Step:
    import paceline

    world = paceline.init(progress=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    model, optimizer = world.distribute(model, optimizer, layout=layout)

    def step(x: torch.Tensor) -> None:
        world.backward(model(x).square().mean())
        world.step(optimizer)

    return step


def with_deepspeed(model: nn.Module, layout: str) -> Step:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": STAGES[layout]},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(x: torch.Tensor) -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


def with_megatron_fsdp(model: nn.Module, layout: str) -> Step:
    from megatron_fsdp import fully_shard

    dist.init_process_group("gloo")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    kept = {"zero1": "optim", "zero2": "optim_grads", "zero3": "optim_grads_params"}[layout]
    model, optimizer = fully_shard(
        module=model, optimizer=optimizer, zero_dp_strategy=kept, fsdp_unit_modules=[nn.Linear]
    )

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


PEERS = {
    "paceline": with_paceline,
    "deepspeed": with_deepspeed,
    "megatron-fsdp": with_megatron_fsdp,
}

if __name__ == "__main__":
    main()
