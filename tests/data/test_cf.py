"""Arrays by the CF conventions: the same file gives the same values in every format."""

import base64
import shutil
import struct

import h5py
import netCDF4
import numpy as np
import pytest
import zarr

from paceline.data import Loader, Shards, pack
from paceline.data.sources.formats.cf import CFDecoder

VALUES = np.arange(24.0).reshape(6, 4)
ATTRIBUTES = {
    "scaled": ("i2", {"scale_factor": 0.5, "add_offset": 10.0, "_FillValue": -999}),
    "single": ("u1", {"scale_factor": np.float32(0.5), "_FillValue": 255}),
    "floats": ("f4", {"_FillValue": 1e20}),
    "missing": ("f8", {"missing_value": -1.0}),
    "unsigned": ("i1", {"_Unsigned": "true", "scale_factor": 2.0}),
    "whole": ("i4", {"_FillValue": -1}),
    "integers": ("i2", {"scale_factor": 3000}),
}


def stored(kind):
    """Return raw values: one is missing where a value for it is given."""
    dtype, attributes = ATTRIBUTES[kind]
    raw = VALUES.astype(dtype)
    if kind == "unsigned":
        raw[0, 0] = -56  # 200
    for name in ("_FillValue", "missing_value"):
        if name in attributes and kind != "whole":
            raw[1, 1] = np.asarray(attributes[name]).astype(dtype)
    return raw, attributes


def packed(path, to, **options):
    pack(path, to, **options)
    shards = Shards(to)
    found = np.stack([shards[i] for i in range(len(shards))])
    return found[np.argsort(np.nan_to_num(found[:, 3]))]


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_hdf5_and_zarr_are_decoded_as_netcdf(tmp_path, kind):
    raw, attributes = stored(kind)
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.set_auto_maskandscale(False)
        file.createDimension("time", 6)
        file.createDimension("lat", 4)
        rest = {name: value for name, value in attributes.items() if name != "_FillValue"}
        made = file.createVariable(
            "sst", raw.dtype, ("time", "lat"), fill_value=attributes.get("_FillValue")
        )
        made.set_auto_maskandscale(False)
        made.setncatts(rest)
        made[:] = raw
    right = packed(f"{tmp_path}/a.nc:sst", tmp_path / "netcdf")
    assert np.isnan(right).any() == (kind in ("scaled", "single", "floats", "missing"))
    shutil.copy(tmp_path / "a.nc", tmp_path / "a.h5")
    found = packed(f"{tmp_path}/a.h5:sst", tmp_path / "hdf5")
    assert found.dtype == right.dtype
    assert np.array_equal(found, right, equal_nan=True)
    for version in (2, 3):
        path = tmp_path / f"{version}.zarr"
        array = zarr.create_array(
            str(path),
            data=raw,
            chunks=(2, 4),
            zarr_format=version,
            **fill(version, raw, attributes),
        )
        array.attrs.update(as_xarray(version, raw, attributes))
        found = packed(path, tmp_path / str(version))
        assert np.array_equal(found, right, equal_nan=True)
        batch = next(iter(Loader(path, 6, shuffle=False)))
        assert np.isnan(batch.numpy()).sum() == np.isnan(right).sum()


def fill(version, raw, attributes):
    """Return where xarray stores a fill value in zarr version 2."""
    found = attributes.get("_FillValue")
    if version == 3:
        return {}
    return {"fill_value": None if found is None else raw.dtype.type(found)}


def as_xarray(version, raw, attributes):
    """Return the attributes that xarray writes to zarr."""
    made = {name: getattr(value, "item", lambda v=value: v)() for name, value in attributes.items()}
    if version == 2:
        made.pop("_FillValue", None)
        return made | {"_ARRAY_DIMENSIONS": ["time", "lat"]}
    if raw.dtype.kind == "f" and "_FillValue" in made:
        made["_FillValue"] = base64.b64encode(struct.pack("<d", made["_FillValue"])).decode()
    return made


def test_fill_value_of_a_zarr_that_xarray_did_not_write_is_a_value(tmp_path):
    zarr.create_array(str(tmp_path / "x.zarr"), data=VALUES, zarr_format=2, fill_value=5.0)
    assert not np.isnan(packed(tmp_path / "x.zarr", tmp_path / "one")).any()


def test_missing_integers_and_invalid_attributes_are_errors(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(6, dtype="i4").reshape(3, 2)
        file["x"].attrs["_FillValue"] = 4
    with pytest.raises(ValueError, match=r"x has missing values, and int32 has no NaN\. HINT"):
        pack(tmp_path / "x.h5", tmp_path / "one")
    for value in ("abc", [1.0, 2.0], b"x"):
        with pytest.raises(ValueError, match=r"^f: the attribute scale_factor is .* no number"):
            CFDecoder({"scale_factor": value}, "i2", "f")


def test_arrays_of_different_lengths_are_decoded(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        x = file.create_dataset("x", 2, h5py.vlen_dtype(np.int16))
        x[0], x[1] = [1, 2], [3]
        x.attrs["scale_factor"] = 0.5
    pack(tmp_path / "x.h5", tmp_path / "one")
    found = sorted(Shards(tmp_path / "one")[i].tolist() for i in range(2))
    assert found == [[0.5, 1.0], [1.5]]


def test_arrays_that_are_not_numeric_are_named(tmp_path):
    """Also beside a named type and an array without values."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["opaque"] = np.zeros(3, "V10")
        file["pairs"] = np.zeros(3, [("a", "f4"), ("b", "i4")])
        file["type"], file["empty"] = np.dtype("f8"), h5py.Empty("f4")
        file["numbers"] = np.zeros((3, 2))
    for name in ("opaque", "pairs"):
        with pytest.raises(ValueError, match=rf"x\.h5:{name} is .*, which is not a numeric array"):
            pack(f"{tmp_path}/x.h5:{name}", tmp_path / "one")
    with pytest.raises(ValueError, match=r"'empty' is a scalar"):
        pack(f"{tmp_path}/x.h5:empty", tmp_path / "one")
    assert pack(f"{tmp_path}/x.h5:numbers", tmp_path / "one").meta.samples == 3
    with netCDF4.Dataset(tmp_path / "x.nc", "w") as file:
        file.createDimension("t", 3)
        kind = file.createCompoundType(np.dtype([("a", "i4")]), "kind")
        file.createVariable("pairs", kind, ("t",))
    with pytest.raises(ValueError, match=r"x\.nc:pairs has the dtype .*, which is not numeric"):
        pack(f"{tmp_path}/x.nc:pairs", tmp_path / "two")
