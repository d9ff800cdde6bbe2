"""Image classification: a residual CNN on small images, plain DDP with a DistributedSampler."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class SmallImages(Dataset):
    def __init__(self, count, size=32):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(count, 3, size, size, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        # <sample x=image i=index>
        return image, self.labels[index]


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return F.relu(x + self.second(F.relu(self.first(x))))


class ResNet(nn.Module):
    def __init__(self, channels=32, blocks=2):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, stride=2)
        self.blocks = nn.Sequential(*[Block(channels) for _ in range(blocks)])
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.stem(x)))
        # <forward h=x>
        return self.head(x.mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # <start rank=rank world=world_size>
    net = ResNet().to(memory_format=torch.channels_last)
    # <model model=net>
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = SmallImages(50 * args.batch_size * world_size)
    sampler = DistributedSampler(dataset)
    train_loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            images = images.contiguous(memory_format=torch.channels_last)
            # <batch x=images>
            loss = F.cross_entropy(model(images), labels)
            # <loss loss=loss model=net again=net(images) x=images>
            optimizer.zero_grad()
            loss.backward()
            # <backward model=net loss=loss>
            optimizer.step()
            step += 1
            # <step model=net optimizer=optimizer loss=loss step=step rank=rank again=net(images)>
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
