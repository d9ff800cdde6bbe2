"""Small sources to pack, made by seed."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def images(folder: Path, count: int = 30, size: tuple[int, int] = (20, 24), seed: int = 0) -> Path:
    """Class folders of JPEGs, and a PNG among each ten; (height, width) as given."""
    draw = np.random.default_rng(seed)
    for k in range(count):
        path = folder / CLASSES[k % 3] / f"{k:04}{'.png' if k % 10 == 9 else '.jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size[::-1]).save(path)
    return folder


def arrays(count: int = 50, shape: tuple[int, ...] = (3, 4), dtype: str = "float32", seed: int = 0):
    """(x, y): of samples that tell which they are, and their classes."""
    x = np.random.default_rng(seed).normal(size=(count, *shape)).astype(dtype)
    x.reshape(count, -1)[:, 0] = np.arange(count)
    return x, np.arange(count) % 7


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a packed set but the one that has a date in it."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "paceline.json"}
