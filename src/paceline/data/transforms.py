"""Transforms of the array of one sample, for ``Loader(transform=...)``.

Each transform is a function of (x, rng), where the state of the NumPy generator rng depends only
on (seed, epoch, sample).

Images have the shape (height, width, channels). For arrays with channels first, pass other
``axes``. Transforms return views where possible; the data is copied once, into the batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Transform = Callable[[Array, np.random.Generator], Array]
IMAGE = (0, 1)  # axes of height and width of an image


@dataclass(frozen=True)
class Chain:
    """Composition of transforms: ``Chain(Crop((224, 224)), Flip(), Normalise.of(shards))``."""

    steps: tuple[Transform, ...]

    def __init__(self, *steps: Transform) -> None:
        object.__setattr__(self, "steps", steps)

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        for step in self.steps:
            x = step(x, rng)
        return x


@dataclass(frozen=True)
class Crop:
    """Random crop or centre crop of an image or array.

    Calling it raises ValueError if the padded array is smaller than ``size``.

    Attributes:
        size: Size of the crop along each of ``axes``.
        middle: Whether to crop the centre instead of a random position.
        pad: Number of zeros that are added on each side of each axis before cropping.
        axes: Axes to crop.
    """

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
                    f"Crop: the size {size} along axis {axis} is too large for an array of "
                    f"{x.shape}. HINT: use Resize before Crop, pad=..., or a smaller size"
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
    """Random flip along each of ``axes``. The default flips images horizontally.

    Attributes:
        axes: Axes to flip, each independently.
        share: Probability of a flip.
    """

    axes: tuple[int, ...] = (1,)
    share: float = 0.5

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        chosen = [axis for axis in self.axes if rng.random() < self.share]
        return np.flip(x, tuple(chosen)) if chosen else x


@dataclass(frozen=True)
class Turn:
    """Random rotation by 0, 90, 180 or 270 degrees, for data without a preferred orientation."""

    axes: tuple[int, int] = IMAGE

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        return np.rot90(x, int(rng.integers(4)), self.axes)


@dataclass(frozen=True)
class Rotate:
    """Random rotation about the centre, with bilinear interpolation. The dtype does not change.

    Attributes:
        degrees: Maximum angle, in either direction.
        fill: Value of output elements that lie outside the input.
        axes: Axes of height and width.
    """

    degrees: float = 15.0
    fill: float = 0.0
    axes: tuple[int, int] = IMAGE

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        return rotated(x, rng.uniform(-self.degrees, self.degrees), self.fill, self.axes)


@dataclass(frozen=True)
class Resize:
    """Resize of an image to (height, width), bilinear and antialiased. The dtype does not change.

    uint8 images are resampled by PIL, others in float32 by torch.
    """

    size: tuple[int, int]

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        return resampled(x, self.size)


@dataclass(frozen=True)
class ResizedCrop:
    """Random crop of random area and aspect ratio, resized to (height, width).

    This is the usual augmentation for ImageNet (Szegedy et al., arXiv 1409.4842). If no random crop
    fits into the image, the largest centred square is used.

    Attributes:
        size: Height and width of the output.
        scale: Range of the area of the crop, as a fraction of the image's area.
        ratio: Range of the ratio of width to height.
        tries: Maximum number of random crops that are drawn until one fits into the image.
    """

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
    """Normalization to float32: (x - mean) / deviation.

    Attributes:
        mean: Mean of all values, or of each channel.
        deviation: Standard deviation of all values, or of each channel. 0 is treated as 1.
        axis: Axis of the channels.
    """

    mean: Any
    deviation: Any
    axis: int = -1

    @classmethod
    def of(cls, shards: Any) -> "Normalise":
        """Return the normalization by the statistics of a packed dataset.

        Raises:
            ValueError: The dataset was packed without statistics.
        """
        statistics = shards.meta.statistics
        if "mean" not in statistics:
            raise ValueError(f"{shards!r} has no statistics. HINT: paceline pack --statistics 4096")
        return cls(statistics["mean"], statistics["deviation"], -1 if shards.images else 0)

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        shape = [1] * x.ndim
        if np.ndim(self.mean):
            shape[self.axis] = -1
        mean = np.asarray(self.mean, np.float32).reshape(shape)
        deviation = np.asarray(self.deviation, np.float32).reshape(shape)
        return (x.astype(np.float32) - mean) / np.where(deviation > 0, deviation, 1)


@dataclass(frozen=True)
class Channels:
    """Selection of channels along ``axis``, in the given order."""

    chosen: Sequence[int]
    axis: int = -1

    def __call__(self, x: Array, rng: np.random.Generator) -> Array:
        return np.take(x, self.chosen, self.axis)


def resampled(x: Array, size: tuple[int, int]) -> Array:
    """Return an image (height, width, channels) resized to ``size``, in the same dtype."""
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
    """Return an array rotated in the plane of two axes, of the same shape and dtype.

    The rotation is counter-clockwise for displayed images. For 90 degrees and a square plane the
    result is that of ``np.rot90``.
    """
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
    # maps output coordinates to input coordinates, both in the range -1 to 1
    back = [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    batch = torch.from_numpy(np.ascontiguousarray(planes, np.float32)).reshape(1, -1, height, width)
    grid = affine_grid(torch.tensor([back]), list(batch.shape), align_corners=False)
    found = grid_sample(batch - fill, grid, align_corners=False) + fill
    return _as_in(x, np.moveaxis(found.reshape(planes.shape).numpy(), (-2, -1), axes))


def _is_picture(x: Array) -> bool:
    """Return whether PIL can process the array: uint8, with 1 or 3 channels."""
    return x.dtype == np.uint8 and x.ndim == 3 and x.shape[2] in (1, 3)


def _picture(x: Array) -> Any:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(x[:, :, 0] if x.shape[2] == 1 else x))


def _array(picture: Any, like: Array) -> Array:
    return np.asarray(picture).reshape(picture.height, picture.width, like.shape[2])


def _as_in(x: Array, values: Array) -> Array:
    """Return ``values`` in the dtype of ``x``, rounded for integer dtypes."""
    return (np.rint(values) if x.dtype.kind in "iu" else values).astype(x.dtype)
