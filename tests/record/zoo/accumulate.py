"""DDP with gradients accumulated over micro-batches, in three ways."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def cycle(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64, help="samples in a micro-batch")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches a step")
    parser.add_argument("--how", choices=["no_sync", "flag", "two"], default="no_sync")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)]
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(40 * args.batch, 512)
    data = TensorDataset(x, x[:, :4].abs())
    loader = DataLoader(data, batch_size=args.batch, sampler=DistributedSampler(data))
    batches = cycle(loader)

    loss = None
    for _ in range(args.steps):
        optimizer.zero_grad()
        if args.how == "two":
            (x1, y1), (x2, y2) = next(batches), next(batches)
            first, second = model(x1), model(x2)
            loss = (F.mse_loss(first, y1) + F.mse_loss(second, y2)) / 2
            loss.backward()
        else:
            for micro in range(args.micro):
                x, y = next(batches)
                is_last = micro == args.micro - 1
                if args.how == "flag":
                    model.require_backward_grad_sync = is_last
                    context = nullcontext()
                else:
                    context = nullcontext() if is_last else model.no_sync()
                with context:
                    loss = F.mse_loss(model(x), y)
                    (loss / args.micro).backward()
        optimizer.step()

    if dist.get_rank() == 0:
        print(f"final loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
