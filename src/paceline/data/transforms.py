"""Transforms of a sample's array, for ``Loader(transform=...)``: each a small function of (x, rng),
where rng depends on (seed, epoch, sample) alone.

Images are (height, width, channels); arrays that have their channels first are cut along other
``axes``. Views are given where they do: the batch copies them once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Transform = Callable[[Array, np.random.Generator], Array]
IMAGE = (0, 1)  # axes of height and width


@dataclass(frozen=True)
class Chain:
    """One after the other: ``Chain(Crop((224, 224)), Flip(), Normalise.of(shards))``."""

    steps: tuple[Transform, ...]

    def __init__(self, *steps: Transform) -> None:
        object.__setattr__(self, "steps", steps)

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        for step in self.steps:
            x = step(x, rng)
        return x


@dataclass(frozen=True)
class Crop:
    """A part of ``size`` along ``axes``, anywhere, or in the middle; of a larger field a patch.
    pad: so many zeros around it before. Raises ValueError where x is smaller."""

    size: tuple[int, ...]
    middle: bool = False
    pad: int = 0
    axes: tuple[int, ...] = IMAGE

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        shape, source = list(x.shape), [slice(None)] * x.ndim
        target = list(source)
        for axis, size in zip(self.axes, self.size, strict=True):
            length = x.shape[axis]
            room = length + 2 * self.pad - size
            if room < 0:
                raise ValueError(
                    f"Crop: {size} along axis {axis} of an array of {x.shape}. HINT: Resize before "
                    "it, pad=..., or a smaller size"
                )
            start = room // 2 if self.middle else int(rng.integers(0, room + 1))
            start -= self.pad
            first = min(max(start, 0), length)
            end = max(min(start + size, length), first)
            source[axis] = slice(first, end)
            target[axis] = slice(first - start, end - start)
            shape[axis] = size
        if not self.pad:
            return x[tuple(source)]
        made = np.zeros(shape, x.dtype)
        made[tuple(target)] = x[tuple(source)]
        return made


@dataclass(frozen=True)
class Flip:
    """Mirrored along each of ``axes`` in a ``share`` of the cases; of an image left and right."""

    axes: tuple[int, ...] = (1,)
    share: float = 0.5

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        chosen = [axis for axis in self.axes if rng.random() < self.share]
        return np.flip(x, tuple(chosen)) if chosen else x


@dataclass(frozen=True)
class Turn:
    """By 0, 1, 2 or 3 quarters in the plane of two axes: for fields without an up and down."""

    axes: tuple[int, int] = IMAGE

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        return np.rot90(x, int(rng.integers(4)), self.axes)


@dataclass(frozen=True)
class Rotate:
    """By a random angle of up to ``degrees`` to either side about the middle, in x's dtype:
    bilinear, and ``fill`` where nothing of x falls. axes: of height and width."""

    degrees: float = 15.0
    fill: float = 0.0
    axes: tuple[int, int] = IMAGE

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        return rotated(x, rng.uniform(-self.degrees, self.degrees), self.fill, self.axes)


@dataclass(frozen=True)
class Resize:
    """An image resampled to (height, width): bilinear, of all pixels that fall into a new one
    (antialiased), in x's dtype; by PIL for uint8, else in float32 by torch."""

    size: tuple[int, int]

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        return resampled(x, self.size)


@dataclass(frozen=True)
class ResizedCrop:
    """A part of an image of random area and shape, resampled to (height, width), as in the
    training of ImageNet's models (Szegedy et al., arXiv 1409.4842). scale: of the area; ratio: of
    width to height."""

    size: tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    tries: int = 10

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        height, width = x.shape[:2]
        low, high = map(math.log, self.ratio)
        for _ in range(self.tries):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                return resampled(Crop((h, w))(x, rng), self.size)
        side = min(height, width)
        return resampled(Crop((side, side), middle=True)(x, rng), self.size)


@dataclass(frozen=True)
class Normalise:
    """(x - mean) / deviation as float32; of each channel along ``axis``, or of all values."""

    mean: Any
    deviation: Any
    axis: int = -1

    @classmethod
    def of(cls, shards: Any) -> "Normalise":
        """By the statistics that a set was packed with. Raises ValueError where it has none."""
        told = shards.meta.statistics
        if "mean" not in told:
            raise ValueError(f"{shards!r} has no statistics. HINT: paceline pack --statistics 4096")
        return cls(told["mean"], told["deviation"], -1 if shards.images else 0)

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        shape = [1] * x.ndim
        if np.ndim(self.mean):
            shape[self.axis] = -1
        mean = np.asarray(self.mean, np.float32).reshape(shape)
        deviation = np.asarray(self.deviation, np.float32).reshape(shape)
        return (x.astype(np.float32) - mean) / np.where(deviation > 0, deviation, 1)


@dataclass(frozen=True)
class Channels:
    """Some of them, in this order."""

    chosen: Sequence[int]
    axis: int = -1

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        return np.take(x, self.chosen, self.axis)


def resampled(x: Array, size: tuple[int, int]) -> Array:
    """An image (height, width, channels) of another size, in its dtype."""
    if x.shape[:2] == size:
        return x
    if _is_picture(x):
        from PIL import Image

        return _array(_picture(x).resize((size[1], size[0]), Image.Resampling.BILINEAR), x)
    import torch
    from torch.nn.functional import interpolate

    batch = torch.from_numpy(np.ascontiguousarray(x, np.float32)).permute(2, 0, 1)[None]
    found = interpolate(batch, size, mode="bilinear", antialias=True, align_corners=False)
    return _as_in(x, found[0].permute(1, 2, 0).numpy())


def rotated(x: Array, degrees: float, fill: float = 0.0, axes: tuple[int, int] = IMAGE) -> Array:
    """An array turned in the plane of two axes, counter-clockwise as images are seen (for 90 in a
    square what np.rot90 gives), of the same shape and dtype."""
    if axes == IMAGE and _is_picture(x):
        from PIL import Image

        way, around = Image.Resampling.BILINEAR, (round(fill),) * x.shape[2]
        colour = around if x.shape[2] > 1 else around[0]
        return _array(_picture(x).rotate(degrees, way, fillcolor=colour), x)
    import torch
    from torch.nn.functional import affine_grid, grid_sample

    planes = np.moveaxis(x, axes, (-2, -1))
    height, width = planes.shape[-2:]
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    # where each new place comes from, with both axes from -1 to 1
    back = [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    batch = torch.from_numpy(np.ascontiguousarray(planes, np.float32)).reshape(1, -1, height, width)
    grid = affine_grid(torch.tensor([back]), list(batch.shape), align_corners=False)
    found = grid_sample(batch - fill, grid, align_corners=False) + fill
    return _as_in(x, np.moveaxis(found.reshape(planes.shape).numpy(), (-2, -1), axes))


def _is_picture(x: Array) -> bool:
    """Whether it is one for PIL."""
    return x.dtype == np.uint8 and x.ndim == 3 and x.shape[2] in (1, 3)


def _picture(x: Array) -> Any:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(x[:, :, 0] if x.shape[2] == 1 else x))


def _array(picture: Any, like: Array) -> Array:
    return np.asarray(picture).reshape(picture.height, picture.width, like.shape[2])


def _as_in(x: Array, values: Array) -> Array:
    """Values in the dtype of x."""
    return (np.rint(values) if x.dtype.kind in "iu" else values).astype(x.dtype)
