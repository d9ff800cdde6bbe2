"""Plain networks that know nothing of layouts, with samples and a loss for each."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORMS = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
MAX_POOLS = {2: nn.MaxPool2d, 3: nn.MaxPool3d}


class UNet(nn.Module):
    """A U-Net of three levels in 2-D or 3-D; skip connections are padded to any size."""

    def __init__(self, dims: int, width: int) -> None:
        super().__init__()
        self.dims, a, b, c = dims, width, 2 * width, 4 * width
        self.first, self.second, self.third = self.pair(1, a), self.pair(a, b), self.pair(b, c)
        self.pool = MAX_POOLS[dims](2)
        self.up2, self.up1 = TRANSPOSED[dims](c, b, 2, 2), TRANSPOSED[dims](b, a, 2, 2)
        self.right2, self.right1 = self.pair(2 * b, b), self.pair(2 * a, a)
        self.head = CONVOLUTIONS[dims](a, 3, 1)

    def pair(self, channels: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before in (channels, width):
            layers += [
                CONVOLUTIONS[self.dims](before, width, 3, padding=1, bias=False),
                BATCH_NORMS[self.dims](width),
                nn.ReLU(inplace=True),
            ]
        return nn.Sequential(*layers)

    def joined(self, skip: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        around: list[int] = []
        for n, m in zip(reversed(skip.shape[2:]), reversed(x.shape[2:]), strict=True):
            around += [(n - m) // 2, n - m - (n - m) // 2]
        return torch.cat([skip, F.pad(x, around)], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = self.second(self.pool(a))
        c = self.third(self.pool(b))
        b = self.right2(self.joined(b, self.up2(c)))
        return self.head(self.right1(self.joined(a, self.up1(b))))


class BasicBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """The layers of torchvision's ``resnet18``, with any width (64 there)."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(a, b, 1 if a == b else 2), BasicBlock(b, b, 1))
                for a, b in pairwise(widths)
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


class DeepLab(nn.Module):
    """Atrous spatial pyramid pooling as in DeepLabv3+: dilations, and a branch over the image."""

    def __init__(self, width: int, dilations: tuple[int, ...]) -> None:
        super().__init__()

        def unit(channels: int, size: int, **options: int) -> nn.Sequential:
            conv = nn.Conv2d(channels, width, size, bias=False, **options)
            return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())

        self.low = unit(3, 3, stride=2, padding=1)
        self.high = unit(width, 3, stride=2, padding=1)
        self.branches = nn.ModuleList(
            [unit(width, 1), *(unit(width, 3, padding=d, dilation=d) for d in dilations)]
        )
        self.image = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1, bias=False), nn.ReLU()
        )
        self.project = unit(width * (len(dilations) + 2), 1)
        self.skip = unit(width, 1)
        self.head = nn.Sequential(unit(2 * width, 3, padding=1), nn.Conv2d(width, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(x)
        high = self.high(low)
        found = [branch(high) for branch in self.branches]
        size = high.shape[-2:]
        found.append(
            F.interpolate(self.image(high), size=size, mode="bilinear", align_corners=False)
        )
        high = self.project(torch.cat(found, 1))
        high = F.interpolate(high, size=low.shape[-2:], mode="bilinear", align_corners=False)
        low = self.head(torch.cat([high, self.skip(low)], 1))
        return F.interpolate(low, size=x.shape[-2:], mode="bilinear", align_corners=False)


class CosmoFlow(nn.Module):
    """Convolutions and pooling of MLPerf's CosmoFlow, then dense layers: four numbers a volume."""

    def __init__(self, width: int, side: int, levels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 2
        for level in range(levels):
            layers += [
                nn.Conv3d(channels, width << level, 3, padding="same"),
                nn.LeakyReLU(0.3),
                nn.MaxPool3d(2),
            ]
            channels, side = width << level, side // 2
        self.features = nn.Sequential(*layers)
        self.dense = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * side**3, 16),
            nn.LeakyReLU(0.3),
            nn.Dropout(0.2),
            nn.Linear(16, 4),
            nn.Tanh(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.features(x)) * 1.2


@dataclass(frozen=True)
class Network:
    """A network, the shape of its samples, and its loss."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    target: Callable[[], torch.Tensor]


def segmentation(classes: int, *shape: int) -> Callable[[], torch.Tensor]:
    """Return a function that draws a class for each position, and -100 for some."""

    def draw() -> torch.Tensor:
        target = torch.randint(0, classes, shape)
        target[:, :2, 1:4] = -100
        return target

    return draw


# no even number of rows where the network accepts it: ranks have parts of different sizes
SMALL = {
    "unet 2-D": Network(
        *(lambda: UNet(2, 3), (2, 1, 19, 14)),
        *(F.cross_entropy, segmentation(3, 2, 19, 14)),
    ),
    "unet 3-D": Network(
        *(lambda: UNet(3, 2), (1, 1, 13, 10, 11)),
        *(F.cross_entropy, segmentation(3, 1, 13, 10, 11)),
    ),
    "resnet-18": Network(
        *(lambda: ResNet18(3), (2, 3, 37, 33)),
        *(F.cross_entropy, lambda: torch.tensor([3, 7])),
    ),
    "deeplab": Network(
        *(lambda: DeepLab(4, (1, 3, 5)), (2, 3, 35, 29)),
        *(F.cross_entropy, segmentation(4, 2, 35, 29)),
    ),
    "cosmoflow": Network(
        *(lambda: CosmoFlow(2, 12, 3), (2, 2, 12, 12, 12)),
        *(F.mse_loss, lambda: torch.rand(2, 4)),
    ),
}
LARGE = {
    "unet 2-D": Network(
        *(lambda: UNet(2, 8), (2, 1, 93, 75)),
        *(F.cross_entropy, segmentation(3, 2, 93, 75)),
    ),
    "unet 3-D": Network(
        *(lambda: UNet(3, 4), (1, 1, 29, 26, 23)),
        *(F.cross_entropy, segmentation(3, 1, 29, 26, 23)),
    ),
    "resnet-18": Network(
        *(lambda: ResNet18(16), (2, 3, 135, 129)),
        *(F.cross_entropy, lambda: torch.tensor([3, 7])),
    ),
    "deeplab": Network(
        *(lambda: DeepLab(8, (6, 12, 18)), (2, 3, 117, 101)),
        *(F.cross_entropy, segmentation(4, 2, 117, 101)),
    ),
    "cosmoflow": Network(
        *(lambda: CosmoFlow(4, 32, 5), (2, 2, 32, 32, 32)),
        *(F.mse_loss, lambda: torch.rand(2, 4)),
    ),
}
