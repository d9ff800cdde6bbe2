"""Satellite patches of twelve bands in three resolutions, as a training reads them when nobody has
looked at its input yet, and three steps later. The case: docs/explanation/case-patches.md.

    cd examples
    python patches.py make ../run/patches --patches 2000
    paceline run -n 2 --record ../run/found patches.py train ../run/patches
    PATCHES=../run/patches paceline pack patches:samples ../run/packed --apply patches:upsampled
    paceline run -n 2 patches.py train ../run/packed --input packed

The patches are SYNTHETIC, drawn by a seed, and only shaped as those of BigEarthNet: bands of 10, 20
and 60 m a pixel, uint16, a TIFF each, and which of 43 classes are seen there. The training is plain
PyTorch for any launcher; --input packed changes its dataset and DataLoader, and nothing else.
"""

import argparse
import csv
import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from paceline.data import Loader, Shards
from paceline.data.transforms import Chain, Flip, Normalise, Turn

SIDES = {f"B{band:02}": 120 for band in (2, 3, 4, 8)}  # pixels of 10 m
SIDES |= dict.fromkeys(("B05", "B06", "B07", "B8A", "B11", "B12"), 60)  # of 20 m
SIDES |= dict.fromkeys(("B01", "B09"), 20)  # of 60 m
SIDE, CLASSES, MIX_UP = 120, 43, 0.2
LEVEL, SPREAD = 2000, 1000  # of the reflectances, about


def make(folder: Path, patches: int, seed: int) -> None:
    """SYNTHETIC patches: FOLDER/bands/PATCH/BAND.tif, and FOLDER/labels.csv."""
    (folder / "bands").mkdir(parents=True)
    spectra = np.random.default_rng(seed).normal(0, 1000, (CLASSES, len(SIDES)))
    often = 1 / np.arange(3, CLASSES + 3)
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        for i in range(patches):
            rng = np.random.default_rng((seed, i))
            seen = rng.choice(CLASSES, rng.integers(1, 6), False, often / often.sum())
            cover = rng.random((len(seen), 4, 4))  # how much of each class is where
            (folder / "bands" / f"{i:06}").mkdir()
            for (name, side), light in zip(SIDES.items(), spectra[seen].T, strict=True):
                field = np.kron(np.tensordot(light, cover, 1), np.ones((side // 4, side // 4)))
                band = LEVEL + field + rng.normal(0, 200, (side, side))
                band = band.clip(0, 10000).astype(np.uint16)
                Image.fromarray(band).save(folder / "bands" / f"{i:06}" / f"{name}.tif")
            table.writerow([f"{i:06}", *np.isin(range(CLASSES), seen).astype(int)])


def labelled(folder: Path) -> tuple[list[Path], np.ndarray]:
    """Each patch's folder, and which classes are seen there: (patches, 43) of 0 and 1."""
    rows = list(csv.reader((folder / "labels.csv").open()))
    return [folder / "bands" / row[0] for row in rows], np.array([row[1:] for row in rows], "u1")


def bands(patch: Path) -> np.ndarray:
    """All pixels of a patch as they are stored, band after band: (80000,) uint16."""
    files = (patch / f"{name}.tif" for name in SIDES)
    return np.concatenate([np.asarray(Image.open(file)).reshape(-1) for file in files])


def upsampled(flat: np.ndarray, rng: object = None) -> np.ndarray:
    """Of these pixels (12, 120, 120), uint16: bands of 20 and 60 m by bicubic interpolation. What
    is upsampled already is given back. rng: as transforms get one; nothing is drawn from it."""
    if flat.ndim == 3:
        return flat
    made, at = np.empty((len(SIDES), SIDE, SIDE), np.uint16), 0
    for band, side in zip(made, SIDES.values(), strict=True):
        pixels = flat[at : at + side * side].reshape(side, side)
        at += side * side
        if side == SIDE:
            band[:] = pixels
        else:
            large = Image.fromarray(pixels.astype(np.float32)).resize((SIDE, SIDE), Image.BICUBIC)
            band[:] = np.asarray(large).clip(0, 65535).round()
    return made


augmented = Chain(upsampled, Flip((1, 2)), Turn((1, 2)), Normalise(LEVEL, SPREAD))


def samples():
    """The patches below $PATCHES as (pixels, labels), for ``paceline pack patches:samples``."""
    for patch, label in zip(*labelled(Path(os.environ["PATCHES"])), strict=True):
        yield bands(patch), label


class Patches(Dataset):
    """The files as they are: read, upsampled, augmented and mixed for each sample anew."""

    def __init__(self, folder: Path) -> None:
        self.patches, self.labels = labelled(folder)

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(torch.randint(1 << 60, ()).item())
        share, other = rng.beta(MIX_UP, MIX_UP), rng.integers(len(self))
        share = np.float32(max(share, 1 - share))
        one, two = (augmented(bands(self.patches[k]), rng) for k in (i, other))
        label = share * self.labels[i] + (1 - share) * self.labels[other]
        return one * share + two * (1 - share), label


def loader_of(args: argparse.Namespace) -> DataLoader:
    """Of files a DataLoader; of a packed set Paceline's, with the same augmentation."""
    options = {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}
    if args.input == "files":
        data, live = Patches(args.folder), {"persistent_workers": args.workers > 0}
        return DataLoader(data, args.batch, sampler=DistributedSampler(data), **live, **options)
    data, work = Shards(args.folder), {"transform": augmented, "mix_up": MIX_UP}
    return Loader(data, args.batch, sampler=DistributedSampler(data), **work, **options)


def batches(loader: DataLoader) -> Iterator[list[torch.Tensor]]:
    """Epoch after epoch."""
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


class Block(nn.Module):
    """Two convolutions beside a shorter way."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.ways = nn.Sequential(
            *(nn.Conv2d(width, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.short = nn.Conv2d(width, out, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.ways(x) + self.short(x))


def network(width: int = 16) -> nn.Sequential:
    """A small ResNet, without a softmax: any of the classes may be seen."""
    stem = (nn.Conv2d(len(SIDES), width, 5, 4, 2), nn.BatchNorm2d(width), nn.ReLU())
    blocks = (Block(width, 2 * width), Block(2 * width, 4 * width))
    head = nn.Linear(4 * width, CLASSES)
    nn.init.constant_(head.bias, -2.6)  # three classes of 43
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def train(args: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # each rank augments in its own way
    loader = loader_of(args)
    losses: list[torch.Tensor] = []
    for patches, labels in islice(batches(loader), args.steps):
        logits = model(patches.to(device, non_blocking=True))
        loss = binary_cross_entropy_with_logits(logits, labels.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    few = min(10, args.steps)
    means = torch.stack([torch.stack(losses[:few]).mean(), torch.stack(losses[-few:]).mean()])
    dist.all_reduce(means)
    if dist.get_rank() == 0:
        first, last = (means / dist.get_world_size()).tolist()
        print(f"loss {first:.4f} in the first {few} steps, {last:.4f} in the last {few}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("make", "train"))
    parser.add_argument("folder", type=Path, help="of the files, or the packed set")
    parser.add_argument("--patches", type=int, default=2000, help="make so many")
    parser.add_argument("--input", choices=("files", "packed"), default="files")
    parser.add_argument("--workers", type=int, default=0, help="processes, or of packed threads")
    parser.add_argument("--batch", type=int, default=32, help="of each rank")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.folder, args.patches, args.seed) if args.what == "make" else train(args)


if __name__ == "__main__":
    main()
