"""Fit a random teacher with DDP: epochs, validation, a checkpoint after each epoch."""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(samples, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 512, generator=g)
    return TensorDataset(x, x[:, :16].sin())


def validate(model, loader):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            total += torch.tensor([F.mse_loss(model(x), y, reduction="sum").item(), y.numel()])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16)]
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    train = make_data(10 * args.batch * world, seed=1)
    valid = make_data(3 * args.batch * world, seed=2)
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler)
    valid_loader = DataLoader(valid, args.batch, sampler=DistributedSampler(valid, shuffle=False))

    folder = tempfile.TemporaryDirectory()
    step, epoch, loss = 0, 0, None
    while step < args.steps:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        valid_loss = validate(model, valid_loader)
        if rank == 0:
            print(f"epoch {epoch} step {step} validation loss {valid_loss:.4f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{folder.name}/epoch{epoch}.pt")
        dist.barrier()
        epoch += 1
    if rank == 0:
        print(f"final loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
