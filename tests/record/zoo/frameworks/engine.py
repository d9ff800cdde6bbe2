"""Training through an engine object that owns the gradients and the optimizers."""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Engine:
    def __init__(self, model, lr=1e-3, accumulate=2, bucket_bytes=1 << 20, sub_group=2):
        self.model, self.accumulate, self.micro_steps = model, accumulate, 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        for p in self.parameters:
            dist.broadcast(p.data, src=0)
        self.optimizers = [
            torch.optim.AdamW(self.parameters[i : i + sub_group], lr=lr)
            for i in range(0, len(self.parameters), sub_group)
        ]
        self.buckets, size = [], bucket_bytes
        for p in reversed(self.parameters):
            if size + p.nbytes > bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.nbytes

    def is_boundary(self):
        return (self.micro_steps + 1) % self.accumulate == 0

    def backward(self, loss):
        (loss / self.accumulate).backward()
        if self.is_boundary():
            self.reduce_gradients()

    def reduce_gradients(self):
        works = []
        for bucket in self.buckets:
            flat = torch.cat([p.grad.flatten() for p in bucket]).div_(dist.get_world_size())
            works.append((dist.all_reduce(flat, async_op=True), flat, bucket))
        for work, flat, bucket in works:
            work.wait()
            pieces = flat.split([p.numel() for p in bucket])
            for p, piece in zip(bucket, pieces, strict=True):
                p.grad.copy_(piece.view_as(p))

    def step(self):
        if self.is_boundary():
            for inner_optimizer in self.optimizers:
                inner_optimizer.step()
            for p in self.parameters:
                p.grad = None
        self.micro_steps += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layers = [nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 8)]
    engine = Engine(nn.Sequential(*layers), accumulate=args.accumulate)
    for _ in range(args.steps * args.accumulate):
        x = torch.randn(args.batch, 512)
        loss = F.mse_loss(engine.model(x), x[:, :8] * x[:, 8:16])
        engine.backward(loss)
        engine.step()
    if dist.get_rank() == 0:
        print(f"final loss {loss.item():.4f}")
    # PyTorch 2.13's gloo threads can abort a process that ends right after a collective
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
