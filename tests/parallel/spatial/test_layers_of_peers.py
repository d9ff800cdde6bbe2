"""The layers and shapes of the table in docs/explanation/spatial-layouts.md, on two ranks."""

import copy
import re
from pathlib import Path

import thread_ranks
import torch
from torch import nn

import paceline

PAGE = Path(paceline.__file__).parents[2] / "docs/explanation/spatial-layouts.md"
TOLERANCE = 1e-12


# name in the table: layers, each with the shape of its samples
LAYERS = {
    "3 x 3 convolution, strides and dilations": [
        (nn.Conv2d(4, 4, 3, padding=1), (2, 4, 8, 8)),
        (nn.Conv2d(4, 4, 3, stride=2, padding=1), (2, 4, 8, 8)),
        (nn.Conv2d(4, 4, 3, padding=2, dilation=2), (2, 4, 12, 8)),
    ],
    "odd heights": [
        (nn.Conv2d(4, 4, 3, padding=1), (2, 4, 9, 7)),
        (nn.Conv2d(4, 4, 3, stride=2, padding=1), (2, 4, 11, 7)),
    ],
    "7 x 7 convolution with stride 2": [(nn.Conv2d(4, 4, 7, stride=2, padding=3), (2, 4, 16, 9))],
    "even kernels with padding": [(nn.Conv2d(4, 4, 4, padding=2), (2, 4, 10, 8))],
    "circular padding": [
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (2, 4, 8, 8)),
    ],
    "reflect padding": [(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), (2, 4, 8, 8))],
    "transposed convolution 2/2": [(nn.ConvTranspose2d(4, 4, 2, 2), (2, 4, 8, 8))],
    "transposed convolution 3/2/1": [
        (nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1), (2, 4, 8, 8)),
    ],
    "pooling 2/2": [(nn.MaxPool2d(2), (2, 4, 8, 8)), (nn.AvgPool2d(2), (2, 4, 8, 8))],
    "maximum pooling 3/2/1": [(nn.MaxPool2d(3, 2, 1), (2, 4, 9, 8))],
    "batch norm in training": [(nn.BatchNorm2d(4), (2, 4, 9, 8))],
    "group norm": [(nn.GroupNorm(2, 4), (2, 4, 9, 8))],
    "instance norm": [(nn.InstanceNorm2d(4, affine=True), (2, 4, 9, 8))],
    "bilinear and nearest interpolation": [
        (nn.Upsample(scale_factor=2, mode="bilinear"), (2, 4, 9, 8)),
        (nn.Upsample(scale_factor=2, mode="nearest"), (2, 4, 8, 8)),
    ],
    "adaptive pooling": [(nn.AdaptiveAvgPool2d((3, 2)), (2, 4, 9, 8))],
    "flatten before a linear layer": [
        (nn.Sequential(nn.Flatten(), nn.Linear(4 * 9 * 8, 3)), (2, 4, 9, 8)),
    ],
}


def differences(world):
    """Return the layers of the table that are not those of the whole sample."""
    wrong = []
    for number, (name, cases) in enumerate(LAYERS.items()):
        for case, (layer, shape) in enumerate(cases):
            torch.manual_seed(100 * number + case)
            # a layer before it, so that it gets a gradient for its input
            plain = nn.Sequential(nn.Conv2d(4, 4, 1), copy.deepcopy(layer)).double()
            model = world.distribute(copy.deepcopy(plain), layout="h2", compare=False)
            x = torch.randn(shape, dtype=torch.float64)
            found, wanted = world.whole(model(x)), plain(x)
            weights = torch.randn(wanted.shape, dtype=torch.float64)
            (found * weights).sum().backward()
            (wanted * weights).sum().backward()
            pairs = [(found, wanted)]
            pairs += [
                (a.grad, b.grad)
                for a, b in zip(model.parameters(), plain.parameters(), strict=True)
            ]
            scale = max(b.norm().item() for _, b in pairs)
            if any((a - b).norm().item() > TOLERANCE * scale for a, b in pairs):
                wrong.append(name)
    return wrong


def test_layers_that_peers_were_tried_with_are_right():
    assert thread_ranks.run(differences) == [[], []]


def test_the_table_of_the_page_has_these_layers():
    rows = re.findall(
        r"^\| ([^|]+?) \| [^|]+ \| [^|]+ \| right \|$", PAGE.read_text(), re.MULTILINE
    )
    assert rows == list(LAYERS)
