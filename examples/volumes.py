"""Volumes that do not fit on a rank: a U-Net and a CosmoFlow-like network, on parts and on crops.

The case: docs/explanation/case-volumes.md.

    cd examples
    python volumes.py make ../run/volumes --size 64 --volumes 4
    paceline run -n 8 volumes.py train ../run/volumes --layout "d2 x h2 x w2" --memory 200

The volumes are SYNTHETIC. "potential": random charges, and the potential at each position, to which
charges at some distance contribute. "waves": noise with long waves, whose share is to be predicted.
The training is a plain one; --layout says what each rank computes.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

import paceline
from paceline.data import Loader

RANGE = 6.0  # positions, over which the potential of a charge falls to 1/e of 1/r
MIB = 1 << 20


def potential(charges: np.ndarray) -> np.ndarray:
    """Return the screened potential of charges in an open box, with a variance of about 3."""
    size = len(charges)
    at = np.arange(2 * size)
    squares = np.minimum(at, 2 * size - at) ** 2  # the doubled box has no periodic images
    r = np.sqrt(squares[:, None, None] + squares[:, None] + squares)
    kernel = np.exp(-r / RANGE) / np.maximum(r, 0.5)
    box = np.zeros((2 * size,) * 3)
    box[:size, :size, :size] = charges
    found = np.fft.irfftn(np.fft.rfftn(box) * np.fft.rfftn(kernel), box.shape, (0, 1, 2))
    return found[:size, :size, :size] * np.sqrt(3 / np.square(kernel).sum())


def draw_potential(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random charges, and the potential at each position."""
    charges = rng.normal(size=(size,) * 3)
    return charges, potential(charges)


def draw_waves(rng: np.random.Generator, size: int) -> tuple[np.ndarray, float]:
    """Return noise with a share of long waves, and this share."""
    share = rng.uniform(-1, 1)
    noise, waves = rng.normal(size=(2, size, size, size))
    return noise + (0.5 + 0.3 * share) * potential(waves), share


def make(args: argparse.Namespace) -> None:
    """Write FOLDER/train.h5 and test.h5, or their samples cut into crops."""
    args.folder.mkdir(parents=True, exist_ok=True)
    draw = draw_potential if args.target == "potential" else draw_waves
    for name, count, seed in (("train", args.volumes, 0), ("test", max(args.volumes // 4, 1), 1)):
        rng = np.random.default_rng((seed, args.size))
        pairs = [draw(rng, args.size) for _ in range(count)]
        inputs = crops(np.stack([x for x, _ in pairs]), args.crop)
        targets = np.asarray([y for _, y in pairs])
        each = len(inputs) // count
        targets = crops(targets, args.crop) if targets.ndim > 1 else targets.repeat(each)[:, None]
        with h5py.File(args.folder / f"{name}.h5", "w") as file:
            file["x"] = inputs.astype(np.float32)
            file["y"] = targets.astype(np.float32)
        print(f"{args.folder.name}/{name}.h5: {len(inputs)} samples of {inputs.shape[1:]}")


def crops(volumes: np.ndarray, size: int | None) -> np.ndarray:
    """Return [samples, 1, size, size, size]: the volumes, or all of their crops."""
    count, side = len(volumes), size or volumes.shape[1]
    n = volumes.shape[1] // side
    cut = volumes.reshape(count, n, side, n, side, n, side).transpose(0, 1, 3, 5, 2, 4, 6)
    return cut.reshape(-1, 1, side, side, side)


class UNet(nn.Module):
    """Four levels; of a volume of 32 positions the lowest one sees all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]
        self.down = nn.ModuleList(
            self.pair(a, b) for a, b in zip([1, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * a, a, 2, 2) for a in widths[:-1])
        self.right = nn.ModuleList(self.pair(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv3d(width, 1, 1)

    def pair(self, channels: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before in (channels, width):
            layers += [nn.Conv3d(before, width, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm3d(width), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for level, pair in enumerate(self.down):
            x = pair(F.max_pool3d(x, 2) if level else x)
            found.append(x)
        for level in (2, 1, 0):
            x = self.right[level](torch.cat([found[level], self.up[level](x)], 1))
        return self.head(x)


def cosmoflow(width: int, size: int) -> nn.Sequential:
    """Convolutions and pooling down to 4^3 positions, then dense layers: one number a volume."""
    layers: list[nn.Module] = []
    channels, side = 1, size
    while side > 4:
        layers += [nn.Conv3d(channels, width, 3, padding=1), nn.LeakyReLU(0.1), nn.AvgPool3d(2)]
        channels, width, side = width, min(2 * width, 32), side // 2
    layers += [nn.Conv3d(channels, width, 3, padding=1), nn.LeakyReLU(0.1)]
    dense = [nn.Flatten(), nn.Linear(width, 32), nn.LeakyReLU(0.1), nn.Linear(32, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), *dense)


def halo_bytes(model: nn.Module, size: int, layout: paceline.Layout) -> int:
    """Return what all ranks receive in a step, in theory: each 3 x 3 x 3 convolution reads a rim of
    one position of its neighbours, and sends the gradients of the rim back.
    """
    parts = [n or 1 for n in (layout.d, layout.h, layout.w)]
    total = 0
    for channels, side in convolutions(model, size):
        count = [[side * (i + 1) // n - side * i // n for i in range(n)] for n in parts]
        rims = [[c + (i > 0) + (i < len(of) - 1) for i, c in enumerate(of)] for of in count]
        rows = np.prod([sum(of) for of in rims]) - np.prod([sum(of) for of in count])
        exchanges = 1 if channels == 1 else 2  # nothing needs the gradient of the input
        total += int(rows) * channels * 4 * exchanges
    return total


def convolutions(model: nn.Module, size: int) -> list[tuple[int, int]]:
    """Return channels and positions along a side of the input of each 3 x 3 x 3 convolution."""
    found: list[tuple[int, int]] = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if module.kernel_size == (3, 3, 3):
            found.append((inputs[0].size(1), inputs[0].size(2)))

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if type(m) is nn.Conv3d]
    with torch.device("meta"):
        model.to("meta")(torch.empty(1, 1, size, size, size))
    for hook in hooks:
        hook.remove()
    return found


def memory(name: str) -> int:
    """Return a size of this process in bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) << 10


def endless(world: paceline.World, data: Any) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from world.batches(data)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    world = paceline.init(seed=args.seed, progress=False)
    loaders = {
        name: Loader((f"{args.folder / name}.h5:x", "y"), 1, shuffle=name == "train")
        for name in ("train", "test")
    }
    size = loaders["train"].dataset.spec_of(0)[0].shape[-1]
    networks = {"unet": UNet, "cosmoflow": lambda width: cosmoflow(width, size)}
    model = networks[args.network](args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.rate)
    model, optimizer = world.distribute(model, optimizer, layout=args.layout, compare=args.compare)
    data = world.shard(loaders["train"], global_batch=args.batch)
    test = world.shard(loaders["test"], every_sample_once=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rate, args.steps + 1)
    if args.memory:  # from now on, as a control group would limit it
        limit = memory("VmData") + args.memory * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, times = memory("VmRSS"), []
    for x, y in islice(endless(world, data), args.steps):
        start = time.perf_counter()
        loss = F.mse_loss(model(x), y)
        world.backward(loss)
        world.step(optimizer)
        schedule.step()
        times.append(time.perf_counter() - start)
    peak = torch.tensor((memory("VmHWM") - before) / MIB)
    if world.size > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    text = f"step {np.median(times[1:]):.2f} s, memory of the largest rank {peak:.0f} MiB"
    if args.evaluate:
        model.eval()
        sums = world.meter()
        with torch.no_grad():
            for x, y in world.batches(test):
                sums.add(error=F.mse_loss(model(x), y, reduction="sum"), power=y.square().sum())
        error, power = sums.sum("error", "power")
        text += f", error {np.sqrt(error / power):.3f} of the target's"
    layout = paceline.Layout.parse(args.layout)
    if world.rank == 0:
        print(text, flush=True)
        if layout.divided_axes:
            bytes_of = halo_bytes(networks[args.network](args.width), size, layout)
            print(f"halos in theory: {bytes_of * args.steps:,} bytes", flush=True)


def halos(args: argparse.Namespace) -> None:
    """Print what recorded runs have received, and how long they waited for it."""
    for file in args.reports:
        layers = json.loads(file.read_text())["halos"]
        total, exposed = (sum(one[key] for one in layers) for key in ("bytes", "exposed"))
        print(f"{file.stem}: {total:,} bytes, exposed {exposed:.1%} of the ranks' time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("make", help="write volumes")
    one.add_argument("folder", type=Path)
    one.add_argument("--target", choices=("potential", "waves"), default="potential")
    one.add_argument("--size", type=int, default=64, help="positions along each side")
    one.add_argument("--volumes", type=int, default=4)
    one.add_argument("--crop", type=int, help="cut the volumes into crops of this size")
    one.set_defaults(call=make)
    one = commands.add_parser("train", help="train on them")
    one.add_argument("folder", type=Path)
    one.add_argument("--network", choices=("unet", "cosmoflow"), default="unet")
    one.add_argument("--layout", default="data")
    one.add_argument("--width", type=int, default=16, help="channels of the first layers")
    one.add_argument("--batch", type=int, default=1, help="samples of all data ranks in a step")
    one.add_argument("--steps", type=int, default=4)
    one.add_argument("--rate", type=float, default=3e-3)
    one.add_argument("--memory", type=int, help="MiB that a rank may allocate for the training")
    one.add_argument("--threads", type=int, default=1)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--evaluate", action="store_true")
    one.add_argument("--compare", action="store_true", help="compare a corner with one rank first")
    one.set_defaults(call=train)
    one = commands.add_parser("halos", help="bytes of halos in reports (paceline run --json)")
    one.add_argument("reports", type=Path, nargs="+")
    one.set_defaults(call=halos)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
