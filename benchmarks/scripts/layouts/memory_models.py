"""Small models whose predicted and measured memory ``memory_prediction.py`` compares."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from paceline.parallel.memory.trace import TrainingStep

BATCH = 16


def _step(
    model: nn.Module, inputs: list[torch.Tensor], *, autocast: bool = False, sgd: bool = False
) -> TrainingStep:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(*inputs).float().square().mean()
        loss.backward()
        optimizer.step()

    return TrainingStep([model], [optimizer], inputs, run)


def mlp() -> TrainingStep:
    """Build a perceptron of four layers."""
    layers = [m for _ in range(4) for m in (nn.Linear(512, 512), nn.ReLU())]
    return _step(nn.Sequential(*layers), [torch.zeros(64, 512)])


def cnn() -> TrainingStep:
    """Build a convolutional classifier with batch normalization, trained by SGD."""
    layers: list[nn.Module] = []
    for width, out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))
    return _step(model, [torch.zeros(BATCH, 3, 32, 32)], sgd=True)


def encoder() -> TrainingStep:
    """Build a transformer encoder of three layers."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return _step(nn.TransformerEncoder(layer, 3), [torch.zeros(8, 64, 128)])


def lstm() -> TrainingStep:
    """Build an LSTM of two layers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(64, 128, 2, batch_first=True)
            self.head = nn.Linear(128, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.lstm(x)[0])
            return out

    return _step(Model(), [torch.zeros(BATCH, 32, 64)])


def mixed_precision() -> TrainingStep:
    """Build a perceptron under autocast to bfloat16."""
    layers = [m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU())]
    return _step(nn.Sequential(*layers), [torch.zeros(128, 512)], autocast=True)


class UNet(nn.Module):
    """Encoder and decoder with one skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 32, 3, padding=1)
        self.middle = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.last = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the input's size."""
        high = self.down(x).relu()
        low = self.up(self.middle(high).relu())
        out: torch.Tensor = self.last(torch.cat([high, low], 1))
        return out


def unet() -> TrainingStep:
    """Build a U-Net."""
    return _step(UNet(), [torch.zeros(BATCH, 3, 32, 32)])


def decoder() -> TrainingStep:
    """Build a transformer decoder of two layers."""
    layer = nn.TransformerDecoderLayer(128, 4, 512, batch_first=True)
    inputs = [torch.zeros(8, 64, 128), torch.zeros(8, 32, 128)]
    return _step(nn.TransformerDecoder(layer, 2), inputs)


class Scatter(nn.Module):
    """Message passing over the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(nn.Linear(128, 64) for _ in range(3))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return the nodes after three rounds of messages."""
        for layer in self.rounds:
            messages = layer(torch.cat([nodes[edges[0]], nodes[edges[1]]], 1)).relu()
            nodes = torch.zeros_like(nodes).index_add(0, edges[1], messages)
        return nodes


def graph() -> TrainingStep:
    """Build a graph network."""
    return _step(Scatter(), [torch.zeros(256, 64), torch.zeros(2, 2048, dtype=torch.int64)])


def volume() -> TrainingStep:
    """Build a 3-D convolutional network."""
    model = nn.Sequential(nn.Conv3d(1, 16, 3), nn.ReLU(), nn.Conv3d(16, 32, 3), nn.ReLU())
    return _step(model, [torch.zeros(4, 1, 16, 16, 16)])


def gan() -> TrainingStep:
    """Build a generator and a discriminator with an optimizer each."""
    generator = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784))
    critic = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizers = [torch.optim.Adam(m.parameters()) for m in (generator, critic)]
    noise, real = torch.zeros(64, 64), torch.zeros(64, 784)

    def run() -> None:
        optimizers[1].zero_grad()
        fake = generator(noise)
        loss = functional.softplus(critic(fake.detach())) + functional.softplus(-critic(real))
        loss.mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        functional.softplus(-critic(fake)).mean().backward()
        optimizers[0].step()

    return TrainingStep([generator, critic], optimizers, [noise, real], run)


def embedding() -> TrainingStep:
    """Build a model whose embedding table has most of its parameters."""
    model = nn.Sequential(nn.Embedding(20000, 64), nn.Linear(64, 64))
    return _step(model, [torch.zeros(BATCH, 64, dtype=torch.int64)])


# The trace was developed with the first group; the second one was measured only afterwards.
DEVELOPED_WITH: list[Callable[[], TrainingStep]] = [mlp, cnn, encoder, lstm, mixed_precision]
KEPT_OUT: list[Callable[[], TrainingStep]] = [unet, decoder, graph, volume, gan, embedding]
