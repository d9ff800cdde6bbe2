"""Mixed precision with a gradient scaler; some batches overflow and their step is skipped."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--overflow-every", type=int, default=7)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(
        nn.Sequential(
            *[nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    torch.manual_seed(1 + rank)
    skipped = 0
    for step in range(args.steps):
        x = torch.randn(args.batch, 512)
        y = x[:, :10].argmax(1)
        if step % args.overflow_every == args.overflow_every - 1:
            x = x * 1e38  # a broken batch

        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        elif rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {before:.0f}")
    if rank == 0:
        print(f"final loss {loss.item():.4f}, {skipped} steps skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
