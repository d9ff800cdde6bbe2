"""A small residual network: batch normalization over all ranks, OneCycle, random flips and shifts."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Images(Dataset):
    def __init__(self, count, seed, augment):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (count,), generator=g)
        self.images = torch.randn(count, 1, 16, 16, generator=g) * 0.5
        for i, label in enumerate(self.labels):
            self.images[i, 0, 4 * label : 4 * label + 4] += 1
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.augment:
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
            image = image.roll(int(torch.randint(-2, 3, ())), -1)
        return image, self.labels[i]


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class GlobalBatchNorm(nn.Module):
    """Batch normalization with the statistics of the batch of all ranks."""

    def __init__(self, channels, momentum=0.1):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))
        self.momentum = momentum

    def forward(self, x):
        if self.training:
            count = torch.full((1,), float(x.numel() // x.shape[1]))
            sums = torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count])
            sums = SumOverRanks.apply(sums)
            mean, square = (sums[:-1] / sums[-1]).chunk(2)
            var = square - mean**2
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var * sums[-1] / (sums[-1] - 1), self.momentum)
        else:
            mean, var = self.mean, self.var
        x = (x - mean[:, None, None]) * (var[:, None, None] + 1e-5).rsqrt()
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = GlobalBatchNorm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = GlobalBatchNorm(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, 1, 1, bias=False)
        self.layers = nn.Sequential(Block(8, 16, 2), Block(16, 16, 1))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layers(F.relu(self.stem(x))).mean((2, 3)))


@torch.no_grad()
def validate(net, loader):
    net.eval()
    counts = torch.zeros(2)
    for images, labels in loader:
        counts[0] += (net(images).argmax(1) == labels).sum()
        counts[1] += len(labels)
    dist.all_reduce(counts)
    net.train()
    return counts


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = ResNet()
    model = DistributedDataParallel(net)
    torch.manual_seed(args.seed + 1 + rank)  # the workers' seeds come from it

    train_set = Images(192, 0, not args.no_augment)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
    )
    val_set = Images(61, 1, False)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 8)
    lr = args.lr * args.batch_size * world_size / 16
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, epochs=args.epochs, steps_per_epoch=len(train_loader)
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        counts = validate(net, val_loader)
        if rank == 0:
            print(f"Epoch {epoch + 1}/{args.epochs}  val acc {counts[0] / counts[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-augment", action="store_true")
    main(parser.parse_args())
