"""Ranks that share samples read their part of them."""

import h5py
import numpy as np
import pytest
import zarr

from paceline.data import Loader
from paceline.data.loading.open_dataset import PartDataset
from paceline.data.sources.formats.hdf5 import HDF5Rows
from paceline.data.sources.formats.zarrs import ZarrRows

X = np.arange(3 * 2 * 4 * 6, dtype=np.float32).reshape(3, 2, 4, 6)
Y = np.arange(3 * 4 * 6, dtype=np.int64).reshape(3, 4, 6) % 5


def cut(shape):
    return (slice(None),) * (len(shape) - 2) + (slice(1, 3), slice(None))


def sources(tmp_path):
    with h5py.File(tmp_path / "volumes.h5", "w") as file:
        file["x"], file["y"] = X, Y
    group = zarr.open_group(str(tmp_path / "volumes.zarr"), mode="w")
    for name, values in (("x", X), ("y", Y)):
        group.create_array(name, data=values, chunks=(1, *values.shape[1:]))
    return {
        "hdf5": (f"{tmp_path}/volumes.h5:x", "y"),
        "zarr": (f"{tmp_path}/volumes.zarr:x", "y"),
        "arrays": (X, Y),
    }


@pytest.mark.parametrize("kind", ["hdf5", "zarr", "arrays"])
def test_a_loader_reads_hyperslabs_of_samples_and_labels(tmp_path, kind, monkeypatch):
    dataset = Loader(sources(tmp_path)[kind]).dataset
    found = PartDataset(dataset, cut)
    assert found.shapes == ((2, 4, 6), (4, 6))

    def read(*_):
        raise AssertionError("a sample is read whole")

    monkeypatch.setattr(HDF5Rows, "read", read)
    monkeypatch.setattr(ZarrRows, "read", read)
    for i in range(3):
        x, y = np.zeros((1, 2, 2, 6), np.float32), np.zeros((1, 2, 6), np.int64)
        found.read_into(i, x, y, 0, None)
        np.testing.assert_array_equal(x[0], X[i, :, 1:3])
        np.testing.assert_array_equal(y[0], Y[i, 1:3])


def test_class_labels_and_samples_without_positions_stay_whole(tmp_path):
    classes = PartDataset(Loader((X, np.arange(3))).dataset, cut)
    assert classes.shapes == ((2, 4, 6), None)
    assert classes.read(2, None)[1] == 2
    assert not PartDataset(Loader((X, Y)).dataset, lambda shape: None).is_divided
