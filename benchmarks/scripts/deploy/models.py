"""The models of the benchmarks of `paceline export`."""

import torch
from torch import nn
from torch.nn import functional


class Empty(nn.Module):
    """One addition: the time of a call is that of the interface."""

    def forward(self, x):
        return x + 1


def mlp():
    layers = [nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8)]
    return nn.Sequential(*layers)


class SmallUNet(nn.Module):
    """Two levels on images of 16 by 16."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1))

    def forward(self, x):
        wide = self.first(x)
        return self.last(torch.cat([wide, self.up(self.deep(self.down(wide)))], 1))


class SmallTransformer(nn.Module):
    """Two layers with two heads, on 8 tokens of 32 values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.feed = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        three = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 16)).permute(0, 2, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*three.unbind(1))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


# Name: how it is built, and the shape of a sample.
MODELS = {
    "empty": (Empty, (1,)),
    "mlp": (mlp, (16,)),
    "unet": (SmallUNet, (2, 16, 16)),
    "transformer": (SmallTransformer, (8, 32)),
}


def build(name):
    torch.manual_seed(0)
    function, shape = MODELS[name]
    return function().eval(), shape
