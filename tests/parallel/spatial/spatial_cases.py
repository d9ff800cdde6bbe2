"""Random layers on random shapes, computed whole and in parts on all ranks, and compared.

Run by a launcher: ``spatial_cases.py COUNT SEED OUT LAYOUT...``. Rank 0 writes the cases that
differ, with the largest relative difference of all others.
"""

import json
import math
import random
import sys

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import paceline
from paceline.cost.layout import Layout
from paceline.parallel.mesh import Mesh
from paceline.parallel.spatial import convolution as convolutions
from paceline.parallel.spatial.samples import FROM_END, even_parts, spatial_groups
from paceline.parallel.spatial.split_tensor import SplitTensor, split

TOLERANCE = 1e-12


def pick(r, count, low, high):
    """Return one number, or one for each dim."""
    values = [r.randint(low, high) for _ in range(count)]
    return values[0] if r.random() < 0.5 else tuple(values)


def convolution(r, count):
    kernel = [r.randint(1, 5) for _ in range(count)]
    dilation = [r.choice((1, 1, 2, 3)) for _ in range(count)]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    mode = r.choice(("zeros", "zeros", "reflect", "replicate", "circular"))
    how = r.random()
    if how < 0.2:
        padding, stride = "same", 1
    else:
        padding = tuple(r.randint(0, max(one, 1)) for one in reach)
        stride = tuple(r.randint(1, 4) for _ in range(count))
    groups = r.choice((1, 1, 2))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[count - 1]
    return kind(
        *(4, 2 * r.randint(1, 2), tuple(kernel)),
        stride=stride,
        padding=padding,
        dilation=tuple(dilation),
        groups=groups,
        bias=r.random() < 0.7,
        padding_mode=mode,
    )


def transposed(r, count):
    stride = [r.randint(1, 4) for _ in range(count)]
    dilation = [r.choice((1, 1, 2)) for _ in range(count)]
    kernel = [r.randint(1, 5) for _ in range(count)]
    padding = [r.randint(0, d * (k - 1)) for d, k in zip(dilation, kernel, strict=True)]
    extra = [r.randint(0, max(max(s, d) - 1, 0)) for s, d in zip(stride, dilation, strict=True)]
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[count - 1]
    return kind(
        *(4, 2 * r.randint(1, 2), tuple(kernel)),
        stride=tuple(stride),
        padding=tuple(padding),
        output_padding=tuple(extra),
        groups=r.choice((1, 2)),
        dilation=tuple(dilation),
        bias=r.random() < 0.7,
    )


def pooling(r, count):
    kernel = [r.randint(1, 5) for _ in range(count)]
    stride = r.choice((None, tuple(r.randint(1, 4) for _ in range(count))))
    padding = tuple(r.randint(0, k // 2) for k in kernel)
    ceil = r.random() < 0.4
    if r.random() < 0.5:
        kind = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[count - 1]
        return kind(tuple(kernel), stride, padding, r.choice((1, 1, 2)), ceil_mode=ceil)
    kind = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[count - 1]
    more = {"divisor_override": r.choice((None, 3))} if count > 1 else {}
    return kind(tuple(kernel), stride, padding, ceil, r.random() < 0.5, **more)


def adaptive(r, count):
    size = r.choice((1, pick(r, count, 1, 7)))
    kinds = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
    if r.random() < 0.3:
        kinds = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
    return kinds[count - 1](size)


def norm(r, count):
    kind = r.choice(("batch", "batch", "group", "instance", "layer"))
    affine = r.random() < 0.7
    if kind == "batch":
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        return kinds[count - 1](4, affine=affine, momentum=r.choice((0.1, None)))
    if kind == "group":
        return nn.GroupNorm(r.choice((1, 2, 4)), 4, affine=affine)
    if kind == "instance":
        kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
        return kinds[count - 1](4, affine=affine)
    return OverChannels()


class OverChannels(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.mix(self.norm(x.movedim(1, -1))).movedim(-1, 1)


class Resample(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def extra_repr(self):
        return str(self.options)

    def forward(self, x):
        return F.interpolate(x, **self.options)


def resampling(r, count):
    modes = ["nearest", "nearest-exact", ("linear", "bilinear", "trilinear")[count - 1]]
    mode = r.choice([*modes, "bicubic"] if count == 2 else modes)
    options = {"mode": mode}
    if r.random() < 0.5:
        options["size"] = tuple(r.randint(1, 23) for _ in range(count))
    else:
        factors = [r.choice((0.5, 1.5, 2.0, 3.0, 0.7, 2.3)) for _ in range(count)]
        options["scale_factor"] = factors[0] if r.random() < 0.5 else tuple(factors)
        options["recompute_scale_factor"] = r.choice((None, True))
    if "nearest" not in mode:
        options["align_corners"] = r.random() < 0.5
    return Resample(**options)


class Chain(nn.Module):
    """Operations of models between their layers."""

    def __init__(self, r, count):
        super().__init__()
        self.number, self.count = r.randint(0, 9), count
        self.first = convolution(random.Random(1), count)
        self.weight = nn.Parameter(torch.randn(4, *[1] * count))

    def extra_repr(self):
        return f"{self.number}"

    def forward(self, x):
        dims = tuple(range(2, x.dim()))
        match self.number:
            case 0:
                return torch.cat([x, F.relu(x * self.weight)], 1).softmax(1)
            case 1:
                return x * x.mean(dims, keepdim=True) + x.var(dims, keepdim=True).sqrt()
            case 2:
                return x.flatten(1)[:, :7].tanh()
            case 3:
                x = x.clone()
                x += 1
                x.mul_(self.weight)
                return F.silu(x, inplace=True)
            case 4:
                return x[:, 1:3, ..., 2:-1].abs().transpose(0, 1)
            case 5:
                return F.pad(x, [1, 2] * self.count) - 0.5
            case 6:
                a, b = x.chunk(2, 1)
                return torch.where(a > b, a.exp(), b) / (1 + a.square())
            case 7:
                place = torch.arange(x.size(-1), dtype=x.dtype)  # broadcasts along the width
                return x * place + place.sin()
            case 8:
                return x.flatten(2).mean(-1) @ torch.ones(4, 3, dtype=x.dtype)
            case _:
                return (
                    F.avg_pool1d(x, 2) if self.count == 1 else x.view(x.size(0), 2, 2, *x.shape[2:])
                )


MAKERS = [
    *(convolution, convolution, transposed, pooling, pooling, adaptive, norm, norm, resampling),
    Chain,
]


def compare(r, groups, layout):
    """Compute one random layer both ways; return its text and the largest relative difference."""
    seed = r.randrange(1 << 30)
    axes = list(groups.lines)
    least = max(FROM_END[axis] for axis in axes)
    count = r.randint(least, 3)
    layer = r.choice(MAKERS)(r, count)
    high = 19 if count < 3 else 11
    shape = [r.randint(1, 3), 4]
    for from_end in range(count, 0, -1):
        ranks = next((len(groups.lines[a].ranks) for a in axes if FROM_END[a] == from_end), 1)
        shape.append(r.randint(ranks, high))
    text = f"{layout}: {shape} {type(layer).__name__} {layer!r}"
    torch.manual_seed(seed)
    layer = layer.double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(shape, dtype=torch.float64)
    parted = {key: value.clone() for key, value in layer.state_dict().items()}
    x.requires_grad_()
    try:
        expected = layer(x)
    except (RuntimeError, ValueError) as error:
        return text, 0.0, f"PyTorch refuses: {error}"
    if not expected.isfinite().all():  # windows of maximum pooling without a position
        return text, 0.0, "PyTorch has no gradient"
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (expected * weights).sum().backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    statistics = [b.clone() for b in layer.buffers()]

    layer.load_state_dict(parted)
    layer.zero_grad()
    part = split(x.detach(), even_parts(x.shape, groups), groups)
    part.local.requires_grad_()
    found = layer(part)
    loss = (found * weights).sum()
    loss.backward()
    whole = found.whole() if isinstance(found, SplitTensor) else found
    sharing = math.prod(len(line.ranks) for line in groups.lines.values())
    mine = SplitTensor(part.local.grad / sharing, part.parts, groups)
    others = []
    for parameter in layer.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.distributed.all_reduce(grad)
        others.append(grad / torch.distributed.get_world_size())
    error = relative(whole, expected)
    how = getattr(layer, "options", {})
    if "nearest" in how.get("mode", "") and how.get("scale_factor"):
        gradients = []  # PyTorch's backward takes other rows than its forward for some factors
    mine_whole = mine.whole()
    for one, other in zip([mine_whole, *others], gradients, strict=bool(gradients)):
        error = max(error, relative(one, torch.zeros_like(one) if other is None else other))
    for one, other in zip(layer.buffers(), statistics, strict=True):
        error = max(error, relative(one, other))
    return text, error, ""


def relative(found, expected):
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    scale = expected.double().abs().max().item()
    difference = (found.double() - expected.double()).abs().max().item()
    return (
        0.0 if difference == 0 else difference / max(scale, 1e-300) if difference > 1e-13 else 0.0
    )


def main():
    count, seed, out, *layouts = sys.argv[1:]
    world = paceline.init(progress=False)
    made = []
    for text in layouts:
        mesh = Mesh(world.rank, world.size)
        mesh.arrange(Layout.parse(text), ["node"] * world.size)
        made.append((text, spatial_groups(mesh)))
    r = random.Random(int(seed))
    wrong, refused, largest = [], [], 0.0
    for _ in range(int(count)):
        layout, groups = r.choice(made)
        # as for large layers, and for float32 on CPUs
        convolutions.MIN_OVERLAPPED = r.choice((1, 1 << 60))
        convolutions.DTYPES = r.choice(((), (torch.float64,)))
        convolutions.MIN_PRODUCTS = 1
        try:
            text, error, reason = compare(r, groups, layout)
        except ValueError as found:
            refused.append(str(found))
            continue
        if reason:
            refused.append(reason)
        elif not error <= TOLERANCE:
            wrong.append(f"{error:.1e} {text}")
        else:
            largest = max(largest, error)
    if world.rank == 0:
        with open(out, "w") as file:
            json.dump({"wrong": wrong, "refused": refused, "largest": largest}, file)


if __name__ == "__main__":
    main()
