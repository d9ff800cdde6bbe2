"""Models that the tests export."""

import torch
from torch import nn
from torch.nn import functional

from paceline.deploy.export import export_model
from paceline.deploy.native_model import NativeModel
from paceline.deploy.specification import parse_input


def export(model, path, *inputs, **options):
    """Export with the builtin backend, unless options say another."""
    said = [parse_input(one) for one in inputs]
    options = {"backends": ["builtin"], **options}
    return export_model(model, [spec for _, spec in said], said[0][0], path, **options)


def largest_error(model, path, dtype, *shapes, scale=1):
    """Of new random inputs, relative to the largest output of the model in eager PyTorch."""
    made = [scale * torch.randn(shape, dtype=getattr(torch, dtype)) for shape in shapes]
    with torch.no_grad():
        expected = model.to(made[0].dtype).eval()(*made)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = [torch.full_like(y, torch.nan, memory_format=torch.contiguous_format) for y in expected]
    with NativeModel(path) as native:
        native.run(made, found)
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
    return max(map(float, errors))


WEIGHTS = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])


def scale():
    """y[i][j] = 10 (j + 1) + sum over k of (k + 1) x[i][k]: programs/ know it."""
    layer = nn.Linear(3, 2)
    layer.load_state_dict({"weight": WEIGHTS, "bias": torch.tensor([10.0, 20.0])})
    return layer


def mlp(inputs=6, outputs=3, width=33):
    torch.manual_seed(inputs)
    layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.SiLU()]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(width, outputs))


class Net(nn.Module):
    """A small U-Net: strided and transposed convolutions, normalization, a skip."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.down = nn.Conv2d(12, 20, (3, 4), stride=2, padding=1, groups=4)
        self.group = nn.GroupNorm(5, 20)
        self.up = nn.ConvTranspose2d(20, 8, 3, stride=2, padding=1, output_padding=1)
        self.last = nn.Conv2d(20, 2, 1)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        wide = self.norm(self.first(x)).relu()
        deep = functional.gelu(self.group(self.down(functional.pad(wide, (0, 1, 1, 0)))))
        deep = functional.max_pool2d(deep, 3, stride=1, padding=1)[:, :, :4, :4]
        near = functional.interpolate(deep, scale_factor=2, mode="nearest")
        smooth = functional.interpolate(deep, size=(8, 8), mode="bilinear")
        up = self.up(deep) + near[:, :8] * smooth[:, 8:16]
        return self.last(torch.cat([wide, up], 1))


class Attention(nn.Module):
    """One block of a transformer, and a head over all positions."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(0, 2, 3, 1, 4).unbind(1)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head((x + self.out(mixed)).mean(1))


class Elementwise(nn.Module):
    """Every operator on single elements, with broadcasting and constants."""

    def forward(self, x, y):
        many = [
            *(x.relu(), functional.leaky_relu(x, 0.2), x.tanh(), x.sigmoid(), functional.silu(x)),
            *(functional.gelu(x), functional.gelu(x, approximate="tanh"), functional.elu(x, 0.7)),
            *(functional.softplus(x), x.exp(), x.clamp(-0.5, 0.7), x.abs(), -x, x.sin(), x.cos()),
            *((x * x + 1).sqrt(), x**2, (x.abs() + 1) ** 1.5, 1 / (x * x + 1), (x * x + 0.1).log()),
            *(functional.selu(x), functional.mish(x), functional.hardswish(x), functional.relu6(x)),
        ]
        total = torch.stack(many, 1)  # [batch, many, 5]
        z = total * y.unsqueeze(1) + torch.arange(5.0, dtype=x.dtype) - y[:, :1].unsqueeze(1)
        z = torch.maximum(z, 3 - total) / torch.tensor(1.5, dtype=x.dtype)
        return z.softmax(1).amax(2), z.sum((1, 2)).reshape(-1, 1), z.transpose(1, 2).mean(2)


class Volume(nn.Module):
    """Convolutions in one and three dimensions, pooling."""

    def __init__(self):
        super().__init__()
        self.three = nn.Conv3d(2, 6, 3, padding="same", dilation=(1, 2, 1))
        self.up = nn.ConvTranspose3d(6, 4, 2, stride=2, groups=2)
        self.one = nn.Conv1d(4, 3, 5, stride=2)

    def forward(self, x):
        x = functional.avg_pool3d(self.three(x).tanh(), 2)
        x = functional.max_pool3d(self.up(x), 3, stride=1, padding=1)
        x = functional.adaptive_avg_pool3d(x, (2, 2, 1)).flatten(2)
        return self.one(functional.pad(x, (3, 4), value=0.5)).flatten(1)


def with_example():
    return mlp(4, 2), torch.randn(5, 4)


class Conditional(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
