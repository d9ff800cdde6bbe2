"""Layouts that divide layers, models and samples, on one GPU: each equals one process on the CPU.

The ranks are threads that share the GPU, since NCCL refuses two ranks on one.
"""

import pytest
import thread_ranks
import torch
import torch.nn.functional as F  # noqa: N812
from on_gpu import DEVICE
from torch import nn

from paceline.optim import LAMB, LARS

pytestmark = [pytest.mark.gpu, pytest.mark.limit(90)]


class Attention(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


class Residual(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


def resnet():
    first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(first, Residual(), Residual(), Residual(), head)


class UNet(nn.Module):
    def __init__(self, dims=2):
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        self.pool = (nn.MaxPool2d if dims == 2 else nn.MaxPool3d)(3, 2, 1)
        self.a, self.norm = conv(1, 4, 3, padding=1), norm(4)
        self.b, self.group = conv(4, 8, 3, stride=1, padding=1), nn.GroupNorm(2, 8)
        self.up, self.head = up(8, 4, 2, 2), conv(8, 3, 1)

    def forward(self, x):
        a = F.relu(self.norm(self.a(x)))
        return self.head(torch.cat([self.up(F.relu(self.group(self.b(self.pool(a))))), a], 1))


def tokens(generator):
    ids = torch.randint(32, (8, 6), generator=generator)
    return ids, ids.roll(1, 1)


def images(generator):
    return torch.randn(8, 1, 10, 12, generator=generator), torch.arange(8) % 3


def scenes(generator, dims=2):
    sizes = (10, 12) if dims == 2 else (10, 8, 6)
    y = torch.randint(3, (8, *sizes), generator=generator)
    return torch.randn(8, 1, *sizes, generator=generator), y


MODELS = {
    "transformer": (Transformer, tokens),
    "resnet": (resnet, images),
    "unet": (UNet, scenes),
    "volumes": (lambda: UNet(3), lambda generator: scenes(generator, 3)),
}
CASES = [
    ("transformer", "tp2", 2),
    ("transformer", "dp2 x tp2", 4),
    ("resnet", "tp2", 2),
    ("transformer", "pp2", 2),
    ("transformer", "pp2 + schedule=zero-bubble", 2),
    ("transformer", "pp4 + schedule=gpipe", 4),
    ("transformer", "pp2 x dp2", 4),
    ("transformer", "pp2 x tp2", 4),
    ("unet", "h2", 2),
    ("unet", "h2 x w2", 4),
    ("volumes", "d2", 2),
]
OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "LARS": lambda p: LARS(p, lr=0.5, momentum=0.9, weight_decay=1e-3),
    "LAMB": lambda p: LAMB(p, lr=1e-2, weight_decay=1e-2),
}


def trained(world, name, layout="dp1", optimizer="Adam", steps=4):
    """Return the losses of some steps, and the parameters and buffers that this rank has."""
    make, draw = MODELS[name]
    torch.manual_seed(1)
    model = make().double()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    model, optimizer = world.distribute(model, optimizer, layout=layout)
    generator = torch.Generator().manual_seed(2)
    losses, place = [], world.mesh.data_rank
    for _ in range(steps):
        x, y = (t.double() if t.is_floating_point() else t for t in draw(generator))
        share = len(x) // world.mesh.data_size
        own = slice(place * share, (place + 1) * share)
        x, y = x[own].to(world.device), y[own].to(world.device)
        loss = world.forward_backward(model, x, y, loss=F.cross_entropy)
        world.step(optimizer, clip=1.0)
        losses.append(float(world.mean(loss.detach() * share, share)))
    state = {n: t.cpu() for n, t in model.state_dict().items() if t.numel()}
    assert all(p.device.type == world.device.type for p in model.parameters())
    return losses, state


def check(name, layout, size, optimizer="Adam"):
    expected, whole = thread_ranks.alone(lambda world: trained(world, name, "dp1", optimizer))
    found = thread_ranks.run(
        lambda world: trained(world, name, layout, optimizer), size, device=DEVICE
    )
    squares = dict.fromkeys(whole, 0.0)
    for losses, state in found:
        assert losses == pytest.approx(expected, rel=1e-9)
        for key, value in state.items():
            squares[key] += float(value.double().square().sum()) / value.numel()
            if value.shape == whole[key].shape:
                torch.testing.assert_close(value, whole[key], rtol=1e-7, atol=1e-9, msg=key)
    for key, value in whole.items():  # of all ranks, parts of layers too
        mean = float(value.double().square().mean())
        holders = sum(key in state for _, state in found)
        assert squares[key] == pytest.approx(mean * holders, rel=1e-7), key


@pytest.mark.parametrize(("name", "layout", "size"), CASES)
def test_a_layout_of_ranks_on_the_device_trains_as_one_process_on_the_cpu(name, layout, size):
    check(name, layout, size)


@pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
@pytest.mark.parametrize(("name", "layout"), [("transformer", "tp2"), ("unet", "h2")])
def test_norms_of_layers_are_those_of_whole_layers(name, layout, optimizer):
    check(name, layout, 2, optimizer)
