"""A surrogate of a simulation, with a checkpoint after each epoch; goes on where it stopped."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_data(seed, count):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(count, 6, generator=g)
    return TensorDataset(p, torch.stack([(p**2).sum(1), p.prod(1), p.sin().sum(1)], 1))


def save_checkpoint(path, epoch, model, optimizer, scheduler):
    state = {
        "epoch": epoch,
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_checkpoint(path, model, optimizer, scheduler):
    state = torch.load(path, map_location="cpu")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["epoch"] + 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_data, val_data = get_data(0, 160), get_data(1, 40)
    sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(val_data, batch_size=20)

    model = DDP(
        nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    start_epoch = 0
    if os.path.exists(args.checkpoint):
        start_epoch = load_checkpoint(args.checkpoint, model, optimizer, scheduler)
        if rank == 0:
            print(f"resumed at epoch {start_epoch}")

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for params, target in train_loader:
            loss = nn.functional.mse_loss(model(params), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():  # all of it on each rank
            val_loss = sum(
                nn.functional.mse_loss(model(p), t, reduction="sum") for p, t in val_loader
            ) / (3 * len(val_data))
        dist.broadcast(val_loss, src=0)
        scheduler.step(val_loss.item())
        if rank == 0:
            save_checkpoint(args.checkpoint, epoch, model, optimizer, scheduler)
            lr = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch}: val {val_loss.item():.6f} lr {lr:.5f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
