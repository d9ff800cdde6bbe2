"""Layers and networks of the benchmarks and tests of divided samples; needs only PyTorch."""

import torch
import torch.nn.functional as F  # noqa: N812  usual name
from torch import nn

# name in the table of docs/explanation/spatial-layouts.md: layers, each with the shape of its input
LAYERS: dict[str, list[tuple[nn.Module, tuple[int, ...]]]] = {
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
    "stride 2, with an odd number of rows in a part": [
        (nn.Conv2d(4, 4, 1, stride=2), (2, 4, 9, 8)),
        (nn.Conv2d(4, 4, 5, stride=2, padding=2), (2, 4, 9, 8)),
        (nn.Conv2d(4, 4, 3, stride=2, padding=1), (2, 4, 6, 8)),
    ],
    "kernels that read more rows than a part has": [
        (nn.Conv2d(4, 4, 9, padding=4), (2, 4, 6, 8)),
        (nn.Conv2d(4, 4, 3, padding=4, dilation=4), (2, 4, 6, 8)),
    ],
    "pooling 2/2 and 3/3 of 9 rows": [
        (nn.MaxPool2d(2), (2, 4, 9, 8)),
        (nn.MaxPool2d(3), (2, 4, 9, 8)),
    ],
    "padding that differs from side to side": [
        (nn.ZeroPad2d((1, 2, 0, 3)), (2, 4, 9, 8)),
        (nn.ReflectionPad2d((1, 2, 2, 1)), (2, 4, 9, 8)),
        (nn.ReplicationPad2d((1, 2, 2, 1)), (2, 4, 9, 8)),
    ],
    "bilinear interpolation with align_corners": [
        (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), (2, 4, 9, 8)),
    ],
    "nearest interpolation by 1.5": [(nn.Upsample(scale_factor=1.5), (2, 4, 8, 8))],
    "interpolation to a size": [(nn.Upsample(size=(13, 11), mode="bilinear"), (2, 4, 9, 8))],
    "bicubic interpolation": [(nn.Upsample(scale_factor=2, mode="bicubic"), (2, 4, 9, 8))],
}


class UNet(nn.Module):
    """A 3-D U-Net of three levels, with batch or group normalization."""

    def __init__(self, width: int, groups: int = 0) -> None:
        super().__init__()
        one, two, four = width, 2 * width, 4 * width
        self.groups = groups  # 0: batch normalization
        self.first, self.second = self._block(1, one), self._block(one, two)
        self.bottom = self._block(two, four)
        self.up2, self.up1 = nn.ConvTranspose3d(four, two, 2, 2), nn.ConvTranspose3d(two, one, 2, 2)
        self.third, self.last = self._block(four, two), self._block(two, one)
        self.head = nn.Conv3d(one, 1, 1)

    def _block(self, inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers.append(nn.Conv3d(channels, outputs, 3, padding=1))
            if self.groups:
                layers.append(nn.GroupNorm(self.groups, outputs))
            else:
                layers.append(nn.BatchNorm3d(outputs))
            layers.append(nn.ReLU())
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.first(x)
        middle = self.second(F.max_pool3d(fine, 2))
        low = self.up2(self.bottom(F.max_pool3d(middle, 2)))
        joined = self.third(torch.cat([low, middle], 1))
        result: torch.Tensor = self.head(self.last(torch.cat([self.up1(joined), fine], 1)))
        return result
