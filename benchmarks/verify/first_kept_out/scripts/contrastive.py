"""Self-supervised: features of all ranks as negatives, a momentum teacher, a queue of its keys."""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GatherLayer(torch.autograd.Function):
    """All-gather with gradients: each rank gets the sum of the ranks' gradients of its part."""

    @staticmethod
    def forward(ctx, tensor):
        return concat_all_gather(tensor)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def concat_all_gather(tensor):
    """Without gradients."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return torch.cat(gathered)


class Queue:
    def __init__(self, size, dim):
        self.keys = F.normalize(torch.randn(size, dim), dim=1)
        self.at = 0

    def push(self, keys):
        places = (self.at + torch.arange(len(keys))) % len(self.keys)
        self.keys[places] = keys
        self.at = int(self.at + len(keys)) % len(self.keys)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 12))
    teacher = copy.deepcopy(student).requires_grad_(False)
    queue = Queue(64, 12)
    model = DDP(student)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    g = torch.Generator().manual_seed(4)
    hidden = torch.randn(192, 6, generator=g) @ torch.randn(6, 20, generator=g)
    views = [hidden + 0.3 * torch.randn(192, 20, generator=g) for _ in range(2)]
    dataset = TensorDataset(*views)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean_loss = torch.zeros(())
        for first, second in loader:
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters()):
                    slow.lerp_(fast, 0.02)
                keys = F.normalize(teacher(second), dim=1)
            both = F.normalize(model(torch.cat([first, second])), dim=1)
            a, b = both.chunk(2)
            everyone = GatherLayer.apply(b)
            own = torch.arange(len(a)) + rank * len(a)
            in_batch = F.cross_entropy(a @ everyone.T / args.temperature, own)
            logits = torch.cat([(a * keys).sum(1, keepdim=True), a @ queue.keys.T], 1)
            in_queue = F.cross_entropy(
                logits / args.temperature, torch.zeros(len(a), dtype=torch.long)
            )
            loss = in_batch + in_queue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue.push(concat_all_gather(keys))
            mean_loss += loss.detach() / len(loader)
        dist.all_reduce(mean_loss)
        if rank == 0:
            print(f"epoch {epoch:3d} loss {mean_loss.item() / world_size:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
