"""Train a 3-D U-Net whole on rank 0 and in parts on all ranks, in turns; rank 0 writes JSON.

"waiting": parts whose halos do not travel behind the computing of forward.

The ranks have one thread each. While rank 0 trains the whole volume, the others wait in a socket.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  usual name
from spatial_models import UNet
from torch import nn
from torch.profiler import ProfilerActivity, profile

import paceline
from paceline.parallel.spatial import convolution
from paceline.parallel.spatial.exchange import halo_totals


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", default="d2")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = paceline.init(progress=False)
    torch.manual_seed(0)
    whole, plain = UNet(args.width), UNet(args.width)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    model, optimizer = world.distribute(plain, optimizer, layout=args.layout)
    x, y = torch.randn(2, args.samples, 1, *[args.size] * 3)
    times: dict[str, list[float]] = {"whole": [], "parts": [], "waiting": []}
    processor: dict[str, list[float]] = {"whole": [], "parts": [], "waiting": []}
    exposed: dict[str, list[float]] = {"parts": [], "waiting": []}
    kept = {}
    overlaps = convolution.MIN_OVERLAPPED
    for number in range(args.rounds + 1):  # the first one warms up
        for kind in ("whole", "parts", "waiting")[:: -1 if number % 2 else 1]:
            convolution.MIN_OVERLAPPED = overlaps if kind == "parts" else 1 << 62
            waited = halo_totals.exposed_s
            dist.barrier()
            start, start_processor = time.perf_counter(), time.thread_time()
            if kind != "whole":
                world.backward(F.mse_loss(model(x), y))
                world.step(optimizer)
            elif world.rank == 0:
                F.mse_loss(whole(x), y).backward()
                whole.zero_grad()
            used = time.thread_time() - start_processor
            dist.barrier()
            if number:
                times[kind].append(time.perf_counter() - start)
                processor[kind].append(used)
                if kind != "whole":
                    exposed[kind].append(halo_totals.exposed_s - waited)
    for kind, net in (("whole", whole), ("parts", model)):
        if kind == "parts" or world.rank == 0:
            kept[kind] = kept_bytes(net, x, y)
    if world.rank == 0:
        found = {"step_s": times, "processor_s": processor, "exposed_s": exposed}
        args.out.write_text(json.dumps(found | {"kept_bytes": kept}))


def kept_bytes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    """Return the bytes of PyTorch's allocator that a forward leaves for its backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        loss = F.mse_loss(model(x), y)
    events = found.profiler.kineto_results.events()
    kept = sum(event.nbytes() for event in events if event.name() == "[memory]")
    loss.backward()
    return kept


if __name__ == "__main__":
    main()
