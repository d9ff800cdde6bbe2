"""Data parallelism by hand: one all-reduce of all gradients in float16, with a dynamic loss scale,
and an optimizer with trust ratios of the layers.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                m = state["m"] / (1 - b1 ** state["step"])
                v = state["v"] / (1 - b2 ** state["step"])
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                size, length = p.norm(), update.norm()
                trust = (size / length).clamp(0.01, 10) if size > 0 and length > 0 else 1.0
                p.sub_(group["lr"] * trust * update)


class LossScale:
    """Doubled after some steps without overflow, halved after each overflow."""

    def __init__(self, scale=2.0**12, interval=20):
        self.scale, self.interval, self.good = scale, interval, 0

    def update(self, overflow):
        if overflow:
            self.scale, self.good = self.scale / 2, 0
        else:
            self.good += 1
            if self.good == self.interval:
                self.scale, self.good = self.scale * 2, 0


def exchange(model, world_size):
    """Replace all gradients by their means over the ranks."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads]).half()
    flat /= world_size
    dist.all_reduce(flat)
    at = 0
    for g in grads:
        g.copy_(flat[at : at + g.numel()].view_as(g))
        at += g.numel()
    return flat


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    g = torch.Generator().manual_seed(args.seed)
    basis = torch.randn(6, 24, generator=g)  # random Fourier features
    x = torch.rand(192, 6, generator=g)
    targets = (3 * x[:, :1]).sin() + x[:, 1:2] * x[:, 2:3]
    dataset = TensorDataset((x @ basis).cos(), targets)

    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
    )
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = Lamb(model.parameters(), lr=5e-3)
    scale = LossScale()
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for inputs, target in loader:
            loss = nn.functional.mse_loss(model(inputs), target)
            model.zero_grad()
            (loss * scale.scale).backward()
            flat = exchange(model, world_size)
            overflow = not torch.isfinite(flat).all()
            if not overflow:
                for p in model.parameters():
                    p.grad /= scale.scale
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            scale.update(overflow)
            total += torch.tensor([loss.item() * len(target), len(target)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} mse {total[0] / total[1]:.5f} scale {scale.scale:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
