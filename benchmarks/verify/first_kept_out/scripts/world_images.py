"""Images with paceline's world: accumulation of a global batch, dropout, checkpoints."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline


class Patches(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(5, (count,), generator=g)
        self.images = torch.randn(count, 3, 12, 12, generator=g)
        self.images += self.labels[:, None, None, None] * 0.3

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def main():
    world = paceline.init()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 25, 32),
        nn.ReLU(),
        nn.Linear(32, 5),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = world.distribute(model, optimizer)
    torch.manual_seed(1 + world.rank)  # other dropout on each rank
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    world.keep(scheduler=scheduler)
    train = world.shard(DataLoader(Patches(200, 0), batch_size=8, shuffle=True))
    test = world.shard(DataLoader(Patches(45, 1), batch_size=8), every_sample_once=True)

    for epoch in world.epochs(5, checkpoint="run/ckpt"):
        model.train()
        for images, labels in world.batches(train):
            loss = nn.functional.cross_entropy(model(images), labels)
            world.backward(loss)
            world.step(optimizer, clip=5.0)
        scheduler.step()
        model.eval()
        meter = world.meter()
        with torch.no_grad():
            for images, labels in world.batches(test):
                meter.add(correct=(model(images).argmax(1) == labels).sum(), count=len(labels))
        world.log(accuracy=meter.ratio("correct", "count"))


if __name__ == "__main__":
    main()
