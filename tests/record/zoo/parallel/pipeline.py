"""Two pipeline stages, one a rank."""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def block(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--micro", type=int, default=4, help="micro-batches a step")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="gpipe")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    last = rank == world - 1
    torch.manual_seed(rank)
    module = nn.Sequential(block(512), nn.Linear(512, 8)) if last else block(512)
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]
    schedule = kind(stage, n_microbatches=args.micro, loss_fn=F.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)

    data = torch.Generator().manual_seed(7)  # the same batches on every rank
    losses = []
    for _ in range(args.steps):
        x = torch.randn(args.batch, 512, generator=data)
        y = x[:, :8].tanh()
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        elif last:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()

    # the last stage alone knows the loss
    loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
    dist.broadcast(loss, src=world - 1)
    if rank == 0:
        print(f"final loss {loss.item():.4f}")
    # PyTorch 2.13's gloo threads can abort a process that ends right after a collective
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
