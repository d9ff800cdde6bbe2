"""Arrays in HDF5, netCDF and zarr files that the Loader reads in place."""

import warnings

import h5py
import numpy as np
import pytest
import sets
import torch
import zarr

from paceline.data import DataError, Loader
from paceline.data.loading import stored_arrays
from paceline.data.loading.stored_arrays import StoredArrays

X, Y = sets.arrays(100, (2, 8, 8))


@pytest.fixture(scope="module", params=["hdf5", "chunks", "zarr"])
def place(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    if request.param == "zarr":
        group = zarr.open_group(str(folder / "a.zarr"), mode="w")
        group.create_array("x", data=X, chunks=(16, 2, 8, 8))
        group.create_array("y", data=Y, chunks=(100,))
        return folder / "a.zarr"
    with h5py.File(folder / "a.h5", "w") as file:
        more = {"chunks": (16, 2, 8, 8), "compression": "gzip"} if request.param == "chunks" else {}
        file.create_dataset("x", data=X, **more)
        file["y"] = Y
    return folder / "a.h5"


@pytest.mark.parametrize("how", [{"num_workers": 0}, {"num_workers": 3}, {"processes": True}])
def test_batches_match_in_memory_arrays(place, how):
    for x, y in ((place, None), (f"{place}:x", "y"), (f"{place}:x", f"{place}:y")):
        mine = Loader(x if y is None else (x, y), 7, shuffle=True, seed=2, **how)
        plain = Loader((X, Y), 7, shuffle=True, seed=2)
        for (a, b), (c, d) in zip(mine, plain, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)


def test_block_shuffle_decompresses_each_chunk_once(place, monkeypatch):
    loader = Loader(place, 10, shuffle="blocks")
    rows, read = loader.dataset._source.x, []
    plain = rows.read
    monkeypatch.setattr(rows, "read", lambda *ends: read.append(ends) or plain(*ends))
    seen = torch.cat([y for _, y in loader])
    assert sorted(seen.tolist()) == sorted(Y.tolist())
    assert len(read) == -(-100 // loader.dataset.chunk_samples)


def test_chunks_inefficient_for_shuffle_are_reported(place, monkeypatch):
    monkeypatch.setattr(stored_arrays, "CACHE_BYTES", 20_000)
    if StoredArrays(place).chunk_samples == 1:
        with warnings.catch_warnings(action="error"):
            Loader(place, 10, shuffle=True)
        return
    with pytest.warns(UserWarning, match=r"chunks of 16 samples .* HINT: shuffle='blocks'"):
        Loader(place, 10, shuffle=True)
    with warnings.catch_warnings(action="error"):
        Loader(place, 10, shuffle="blocks")


def test_damaged_chunk_is_skipped_as_one_sample(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("x", data=X, chunks=(1, 2, 8, 8), fletcher32=True)
        place = data.id.get_chunk_info(40).byte_offset
    with (tmp_path / "a.h5").open("r+b") as file:
        file.seek(place + 9)
        file.write(b"\xff")
    with pytest.raises(DataError, match=r"a\.h5: sample 40: "):
        list(Loader(tmp_path / "a.h5", 10))
    loader = Loader(tmp_path / "a.h5", 10, on_error="skip")
    with pytest.warns(UserWarning, match="left out a sample"):
        assert sum(len(x) for x in loader) == 99
    assert len(loader.skipped) == 1


def test_variable_length_samples_are_rejected(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        flat = file.create_dataset("x", 3, h5py.vlen_dtype(np.float32))
        flat[0] = [1, 2]
    with pytest.raises(ValueError, match=r"differ in length\. HINT: paceline pack"):
        Loader(tmp_path / "a.h5", 2)
