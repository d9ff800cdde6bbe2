"""Ranks that share samples read their part of them."""

import os

import h5py
import numpy as np
import pytest
import zarr

from paceline.data import Loader, Shards, pack
from paceline.data.format import decode as sample_part
from paceline.data.format.meta_schema import ArraySpec
from paceline.data.format.shard_format import DataError
from paceline.data.loading.open_dataset import PartDataset
from paceline.data.shards import ScratchBuffer
from paceline.data.sources.formats.hdf5 import HDF5Rows
from paceline.data.sources.formats.zarrs import ZarrRows

X = np.arange(3 * 2 * 4 * 6, dtype=np.float32).reshape(3, 2, 4, 6)
Y = np.arange(3 * 4 * 6, dtype=np.int64).reshape(3, 4, 6) % 5


class Rows:
    """The rows 1 and 2 of each sample; this rank compares checksums, or another one does."""

    def __init__(self, checks=False):
        self.compares = checks

    def cut(self, shape):
        return (slice(None),) * (len(shape) - 2) + (slice(1, 3), slice(None))

    def checks(self, i):
        return self.compares


class Undivided(Rows):
    def cut(self, shape):
        return None


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
    found = PartDataset(dataset, Rows())
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
    classes = PartDataset(Loader((X, np.arange(3))).dataset, Rows())
    assert classes.shapes == ((2, 4, 6), None)
    assert classes.read(2, None)[1] == 2
    assert not PartDataset(Loader((X, Y)).dataset, Undivided()).is_divided


def packed(tmp_path, **options):
    """Return a packed dataset, which has the samples in another order, with long rows."""
    x = np.random.default_rng(0).normal(size=(3, 2, 8, 5000)).astype(np.float32)
    y = np.arange(3 * 8 * 5000).reshape(3, 8, 5000)
    pack(x, tmp_path / "packed", y, **options)
    return Shards(tmp_path / "packed")


@pytest.mark.parametrize("options", [{}, {"compress": True}])
def test_parts_of_packed_samples_and_their_labels(tmp_path, options):
    shards = packed(tmp_path, **options)
    found = PartDataset(shards, Rows(checks=True))
    for i in range(3):
        array, label = found.read(i, ScratchBuffer())
        x, y = shards[i]
        np.testing.assert_array_equal(array, x[:, 1:3])
        np.testing.assert_array_equal(label, y[1:3])


@pytest.mark.parametrize(
    "part",
    [
        (slice(1, 2), slice(None), slice(None), slice(None)),
        (slice(None), slice(1, 3), slice(2, 5), slice(1, 4)),
        (slice(None), slice(None), slice(None), slice(5, 7)),
        (slice(None), slice(2, 2), slice(None), slice(None)),
        None,
    ],
)
@pytest.mark.parametrize("run_bytes", [1, 100, 1 << 16])
def test_a_part_of_an_array_in_a_file(tmp_path, part, run_bytes, monkeypatch):
    monkeypatch.setattr(sample_part, "MIN_RUN_BYTES", run_bytes)
    array = np.arange(2 * 4 * 5 * 7, dtype=np.int16).reshape(2, 4, 5, 7)
    path = tmp_path / "array"
    path.write_bytes(b"before" + array.tobytes())
    spec = ArraySpec("int16", array.shape)
    with path.open("rb") as file:
        found = sample_part.read_part(file.fileno(), 6, spec, part)
        np.testing.assert_array_equal(found, array if part is None else array[part])
        path.write_bytes(path.read_bytes()[:20])
        if found.size:
            with pytest.raises(ValueError, match="truncated"):
                sample_part.read_part(file.fileno(), 6, spec, part)


def test_no_rank_reads_a_packed_sample_whole_and_one_compares_its_checksum(tmp_path, monkeypatch):
    shards = packed(tmp_path)
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(preadv(*args)) or read[-1])
    PartDataset(shards, Rows()).read(1, ScratchBuffer())
    row = shards.row(1)
    assert sum(read) == row.length // 4  # 2 of 8 rows
    shard = tmp_path / "packed" / shards.meta.shards[row.shard].file
    content = bytearray(shard.read_bytes())
    content[row.offset] ^= 1  # of a row that this rank does not read
    shard.write_bytes(content)
    PartDataset(shards, Rows()).read(1, ScratchBuffer())
    with pytest.raises(DataError, match=r"sample 1.*a byte has changed"):
        PartDataset(shards, Rows(checks=True)).read(1, ScratchBuffer())
    assert max(read) <= 1 << 20
