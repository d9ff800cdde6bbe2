"""DDP with a profiler session of its own around a few steps."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function, schedule


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)

    counts = []

    def ready(prof):
        counts.append(len(prof.events()))
        if rank == 0:
            print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=4))

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=3, warmup=2, active=3, repeat=1),
        on_trace_ready=ready,
        record_shapes=True,
    ) as prof:
        for _ in range(args.steps):
            x = torch.randn(args.batch, 768, generator=data)
            with record_function("my forward"):
                loss = (model(x) - x.cumsum(1) / 28).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            prof.step()

    if rank == 0:
        print(f"{sum(counts)} events in {len(counts)} traces")
        print(f"final loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
