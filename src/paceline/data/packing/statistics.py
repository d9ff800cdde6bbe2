"""Counts and moments of a set, gathered while it is packed: what a normalisation needs."""

from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

CHANNELS = 64  # a first dim that is as short is one of channels
FEATURES = 4096
CLASSES = 100_000


@dataclass
class Statistics:
    """images: whether channels are the last dim. Means and deviations are over all values of a
    channel, in float64, added up by Chan's formula (Chan, Golub, LeVeque 1979)."""

    images: bool = False
    samples: int = 0
    count: float = 0.0  # values of a channel
    mean: Any = None
    squares: Any = None  # sums of squared differences to the mean
    classes: Counter[int] = field(default_factory=Counter)

    def add(self, array: np.ndarray[Any, Any]) -> None:
        """One sample. One whose channels are not as many as those before is left out."""
        if array.dtype.kind not in "biuf" or not array.size:
            return
        axes = self._axes(array)
        if array.dtype == np.uint8 and axes == (0, 1) and array.ndim == 3:
            mean, squares = _of_bytes(array)
        else:
            values = array.astype(np.float64, copy=False)
            mean = values.mean(axes)
            squares = ((values - np.expand_dims(mean, axes)) ** 2).sum(axes)
        self.merge(Statistics(self.images, 1, array.size / mean.size, mean, squares))

    def merge(self, other: "Statistics") -> None:
        self.classes.update(other.classes)
        if other.mean is None or not other.count:
            return
        if self.mean is None:
            self.samples, self.count = other.samples, other.count
            self.mean, self.squares = np.asarray(other.mean), np.asarray(other.squares)
            return
        if np.shape(other.mean) != np.shape(self.mean):
            return
        count = self.count + other.count
        apart = np.asarray(other.mean) - self.mean
        self.squares = self.squares + other.squares + apart**2 * (self.count * other.count / count)
        self.mean = self.mean + apart * (other.count / count)
        self.samples, self.count = self.samples + other.samples, count

    def _axes(self, array: np.ndarray[Any, Any]) -> tuple[int, ...]:
        """Those that are added up: all but the channels'."""
        if self.images and array.ndim == 3:
            return (0, 1)
        if array.ndim == 1:
            return () if len(array) <= FEATURES else (0,)
        if array.ndim > 1 and len(array) <= CHANNELS:
            return tuple(range(1, array.ndim))
        return tuple(range(array.ndim))

    def as_json(self) -> dict[str, Any]:
        """mean and deviation (population's) by channel, of so many samples; samples by class."""
        told: dict[str, Any] = {}
        if self.mean is not None and self.count and np.all(np.isfinite(self.squares)):
            deviation = np.sqrt(np.asarray(self.squares) / self.count)
            told = {"of": self.samples, "mean": np.asarray(self.mean).tolist()}
            told["deviation"] = deviation.tolist()
        if self.classes and len(self.classes) <= CLASSES:
            told["classes"] = {str(label): self.classes[label] for label in sorted(self.classes)}
        return told

    def as_state(self) -> dict[str, Any]:
        """All of it, as JSON has room for."""
        moments = (
            {}
            if self.mean is None
            else {
                "samples": self.samples,
                "count": self.count,
                "mean": np.asarray(self.mean).tolist(),
                "squares": np.asarray(self.squares).tolist(),
            }
        )
        return {**moments, "classes": sorted(self.classes.items())}

    @classmethod
    def empty(cls, images: bool, channels: tuple[int, ...]) -> "Statistics":
        """Of no sample yet, and for those whose channels have this shape."""
        return cls(images, mean=np.zeros(channels), squares=np.zeros(channels))

    @classmethod
    def of_state(cls, images: bool, state: dict[str, Any]) -> "Statistics":
        made = cls(images, classes=Counter(dict(map(tuple, state["classes"]))))
        if "mean" in state:
            made.samples, made.count = state["samples"], state["count"]
            made.mean, made.squares = np.array(state["mean"]), np.array(state["squares"])
        return made


def _of_bytes(image: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Mean and squares of each channel, from how often each of 256 values is there."""
    counts = _counts(image)
    values = np.arange(256.0)
    mean = counts @ values / counts.sum(1)
    squares = (counts * (values - mean[:, None]) ** 2).sum(1)
    return mean, squares


def _counts(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How often each value is there, by channel. Pillow counts twice as fast as numpy."""
    channels = image.shape[2]
    if channels in (1, 3, 4) and find_spec("PIL") is not None:
        from PIL import Image

        picture = Image.fromarray(image[:, :, 0] if channels == 1 else image)
        return np.array(picture.histogram(), np.int64).reshape(channels, 256)
    return np.stack([np.bincount(image[:, :, c].ravel(), minlength=256) for c in range(channels)])
