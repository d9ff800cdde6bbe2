"""Small source datasets to pack, generated from a seed."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def images(folder: Path, count: int = 30, size: tuple[int, int] = (20, 24), seed: int = 0) -> Path:
    """Write class folders of JPEG files; every tenth file is a PNG. size: (height, width)."""
    draw = np.random.default_rng(seed)
    for k in range(count):
        path = folder / CLASSES[k % 3] / f"{k:04}{'.png' if k % 10 == 9 else '.jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size[::-1]).save(path)
    return folder


def arrays(count: int = 50, shape: tuple[int, ...] = (3, 4), dtype: str = "float32", seed: int = 0):
    """Return samples and their classes. The first value of each sample is its index."""
    x = np.random.default_rng(seed).normal(size=(count, *shape)).astype(dtype)
    x.reshape(count, -1)[:, 0] = np.arange(count)
    return x, np.arange(count) % 7


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a packed dataset except paceline.json, which contains a date."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "paceline.json"}
