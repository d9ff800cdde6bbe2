"""Class counts, means and deviations of a dataset, computed while it is packed."""

from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..format.meta_schema import StatisticsSchema

MAX_CHANNELS = 64  # a first dimension up to this size is treated as channels
MAX_FEATURES = 4096  # one-dimensional samples up to this size have a mean per feature
MAX_CLASSES = 100_000


@dataclass
class Statistics:
    """Moments over all values of a channel, in float64.

    They are merged by the formula of Chan, Golub and LeVeque (1979).

    Attributes:
        images: Whether channels are the last dim.
        samples: Number of samples in the moments.
        count: Number of values per channel.
        mean: Mean per channel.
        squares: Sum of squared differences to the mean, per channel.
        classes: Number of samples by class.
    """

    images: bool = False
    samples: int = 0
    count: float = 0.0
    mean: Any = None
    squares: Any = None
    classes: Counter[int] = field(default_factory=Counter)

    def add(self, array: np.ndarray[Any, Any]) -> None:
        """Add one sample; ignore it if its number of channels differs from the previous ones."""
        if array.dtype.kind not in "biuf" or not array.size:
            return
        axes = self._axes(array)
        if array.dtype == np.uint8 and axes == (0, 1) and array.ndim == 3:
            mean, squares = _image_moments(array)
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
        difference = np.asarray(other.mean) - self.mean
        self.squares = (
            self.squares + other.squares + difference**2 * (self.count * other.count / count)
        )
        self.mean = self.mean + difference * (other.count / count)
        self.samples, self.count = self.samples + other.samples, count

    def _axes(self, array: np.ndarray[Any, Any]) -> tuple[int, ...]:
        """Return the axes to sum over: all but the channels."""
        if self.images and array.ndim == 3:
            return (0, 1)
        if array.ndim == 1:
            return () if len(array) <= MAX_FEATURES else (0,)
        if array.ndim > 1 and len(array) <= MAX_CHANNELS:
            return tuple(range(1, array.ndim))
        return tuple(range(array.ndim))

    def as_json(self) -> StatisticsSchema:
        """Return the results as JSON values.

        They are the number of samples, mean and population standard deviation per channel, and the
        number of samples per class.
        """
        result: StatisticsSchema = {}
        if self.mean is not None and self.count and np.all(np.isfinite(self.squares)):
            deviation = np.sqrt(np.asarray(self.squares) / self.count)
            result = {"of": self.samples, "mean": np.asarray(self.mean).tolist()}
            result["deviation"] = deviation.tolist()
        if self.classes and len(self.classes) <= MAX_CLASSES:
            result["classes"] = {str(label): self.classes[label] for label in sorted(self.classes)}
        return result

    def as_state(self) -> dict[str, Any]:
        """Return the complete state as JSON values."""
        state: dict[str, Any] = {}
        if self.mean is not None:
            state |= {"samples": self.samples, "count": self.count}
            state["mean"] = np.asarray(self.mean).tolist()
            state["squares"] = np.asarray(self.squares).tolist()
        return state | {"classes": sorted(self.classes.items())}

    @classmethod
    def empty(cls, images: bool, channels: tuple[int, ...]) -> "Statistics":
        """Return empty statistics that accept only samples with channels of this shape."""
        return cls(images, mean=np.zeros(channels), squares=np.zeros(channels))

    @classmethod
    def from_state(cls, images: bool, state: dict[str, Any]) -> "Statistics":
        statistics = cls(images, classes=Counter(dict(map(tuple, state["classes"]))))
        if "mean" in state:
            statistics.samples, statistics.count = state["samples"], state["count"]
            statistics.mean = np.array(state["mean"])
            statistics.squares = np.array(state["squares"])
        return statistics


def _image_moments(image: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return mean and squares per channel of a uint8 image, from its histogram."""
    counts = _channel_histograms(image)
    values = np.arange(256.0)
    mean = counts @ values / counts.sum(1)
    squares = (counts * (values - mean[:, None]) ** 2).sum(1)
    return mean, squares


def _channel_histograms(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the histogram of each channel. Pillow computes it twice as fast as numpy."""
    channels = image.shape[2]
    if channels in (1, 3, 4) and find_spec("PIL") is not None:
        from PIL import Image

        picture = Image.fromarray(image[:, :, 0] if channels == 1 else image)
        return np.array(picture.histogram(), np.int64).reshape(channels, 256)
    return np.stack([np.bincount(image[:, :, c].ravel(), minlength=256) for c in range(channels)])
