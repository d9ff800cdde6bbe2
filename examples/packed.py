"""The digits of digits.py as 1,797 small files, packed, and trained from.

    python examples/packed.py --write run/files                  # class folders of PNG files
    paceline pack run/files/train run/packed/train
    paceline pack run/files/test run/packed/test
    python examples/packed.py run/packed
    paceline run -n 4 examples/packed.py run/packed --checkpoint run/packed-ckpt

The Loader's threads decode and shift the images; what is shifted where depends on seed, epoch and
image alone. A test accuracy of 0.997 alone and on 2 ranks, 1.000 on 4: sums in another order are
rounded otherwise, and here one image of 360 is 0.003.
"""

import argparse
import sys
from pathlib import Path

import torch
from digits import RECIPE, accuracy, build_model, load_data
from torch.nn.functional import cross_entropy

import paceline
from paceline.data import Loader
from paceline.data.transforms import Crop

STATED = 0.98


def write(folder):
    """Class folders, as people have them before they pack them."""
    from PIL import Image

    for name, part in zip(("train", "test"), load_data(), strict=True):
        for number, (image, label) in enumerate(part):
            path = folder / name / str(int(label)) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image[0] * 240).round().byte().numpy()).save(path)


class Scaled(torch.nn.Module):
    """uint8 images, as a Loader gives them, in 0..1."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images.float() / 240)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in RECIPE.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("packed", nargs="?", type=Path, help="folder with train and test, packed")
    parser.add_argument("--write", type=Path, help="write the files to this folder, and end")
    parser.add_argument("--checkpoint", help="folder to save to, and to go on from")
    args = parser.parse_args()
    if args.write:
        return write(args.write)
    if args.packed is None:
        parser.error("the packed folder, or --write FOLDER first")

    world = paceline.init(seed=args.seed)
    shifted = Crop((8, 8), pad=1)
    loader = Loader(args.packed / "train", args.batch, shuffle=True, transform=shifted)
    loader = world.shard(loader, global_batch=args.batch)
    validation = world.shard(Loader(args.packed / "test", 90), every_sample_once=True)
    model = Scaled(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer = world.distribute(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    world.keep(scheduler=scheduler)
    for _ in world.epochs(args.epochs, checkpoint=args.checkpoint):
        for images, labels in world.batches(loader):
            world.backward(cross_entropy(model(images), labels))
            world.step(optimizer)
        scheduler.step()
        world.log(accuracy=accuracy(world, model, validation))
    reached = accuracy(world, model, validation)
    if world.rank == 0:
        print(f"test accuracy {reached:.4f} (stated: at least {STATED})", flush=True)
    return int(RECIPE.items() <= vars(args).items() and reached < STATED)


if __name__ == "__main__":
    sys.exit(main())
