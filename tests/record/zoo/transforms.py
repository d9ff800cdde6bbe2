"""DDP with transforms that are modules, called for each sample in the main process."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Flip(nn.Module):
    def forward(self, x):
        return x.flip(-1) if torch.rand(()) < 0.5 else x


class Noise(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x + self.scale * torch.randn_like(x)


class Normalise(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x):
        return (x - self.mean) / self.std


class Signals(Dataset):
    def __init__(self, size, transform=None):
        g = torch.Generator().manual_seed(0)
        self.label = torch.randint(4, (size,), generator=g)
        self.x = 3 + torch.randn(size, 1, 512, generator=g) + self.label[:, None, None]
        self.transform = transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        return (self.transform(x) if self.transform else x), self.label[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    transform = nn.Sequential(Flip(), Noise(0.1), nn.Identity())
    data = Signals(10 * args.batch * dist.get_world_size(), transform)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, num_workers=0)

    example, _ = next(iter(loader))  # one batch, for its statistics only
    normalise = Normalise(example.mean(), example.std())
    net = nn.Sequential(nn.Flatten(), nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 768))
    model = DistributedDataParallel(nn.Sequential(net, nn.ReLU(), nn.Linear(768, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, label in loader:
            x = normalise(x)
            loss = F.cross_entropy(model(x), label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            if step >= args.steps:
                break
    if dist.get_rank() == 0:
        print(f"final loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
