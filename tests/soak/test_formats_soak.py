"""Packing of randomly damaged files of other formats.

``paceline pack`` must not hang, must not be ended by a signal, and must not silently pack only some
of the samples. Not all damage can be detected: without checksums, a pixel may have another value.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import h5py
import netCDF4
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sets
import zarr

from paceline.data import pack
from paceline.data.packing.export import convert

pytestmark = pytest.mark.soak

SEED = int(os.environ["PACELINE_SEED"])
SECONDS, COUNT = 25, 40


def whole(folder, work):
    """Write files of each format with arrays and images, including variants by other software."""
    x, y = sets.arrays(COUNT, (6, 6))
    pictures = sets.images(work / "in", COUNT)
    pack((x, y), work / "arrays")
    pack(pictures, work / "images")
    for kind in ("arrays", "images"):
        for to in ("hdf5", "lmdb", "tfrecord", "webdataset"):
            end = ".h5" if to == "hdf5" else f"-{to}"
            convert(work / kind, folder / f"{kind}{end}", to, shard_bytes=3000)
    with h5py.File(folder / "plain.h5", "w") as file:
        file["x"], file["y"] = x, y
    with h5py.File(folder / "chunks.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(8, 6, 6), compression="gzip")
        file["y"] = y
    for kind in ("NETCDF4", "NETCDF3_CLASSIC", "NETCDF3_64BIT_DATA"):
        with netCDF4.Dataset(folder / f"{kind}.nc", "w", format=kind) as file:
            file.createDimension("time", None)
            file.createDimension("place", 36)
            file.createVariable("x", "f4", ("time", "place"))[:] = x.reshape(COUNT, 36)
    for version in (2, 3):
        group = zarr.open_group(str(folder / f"v{version}.zarr"), mode="w", zarr_format=version)
        group.create_array("x", data=x, chunks=(8, 6, 6))
        group.create_array("y", data=y, chunks=(COUNT,))
    table = pyarrow.table({"x": x.reshape(COUNT, 36).tolist(), "y": y.tolist()})
    pyarrow.parquet.write_table(table, folder / "lists.parquet", row_group_size=16)
    rows = [{"bytes": path.read_bytes()} for path in sorted(pictures.rglob("*.*"))]
    table = pyarrow.table({"image": rows, "label": np.arange(COUNT)})
    pyarrow.parquet.write_table(table, folder / "images.parquet", row_group_size=16)


def wrong(one):
    """Return why the result of a pack is an error of Paceline, or None."""
    if one["ended"] == "0":
        if one["bad"]:
            return f"a set with {one['bad']} bad samples"
        if one["samples"] != COUNT and not one["notes"]:
            return f"{one['samples']} samples without a word"
        return None
    if one["ended"] != "2":
        return f"ended with {one['ended']}"
    if one["samples"] is not None:
        return "a set beside an error"
    if "Traceback" in one["said"] or "paceline: " not in one["said"]:
        return "no line that says what is wrong"
    return None


def test_pack_of_damaged_files_reports_error_or_is_correct(tmp_path):
    print(f"PACELINE_SEED={SEED}")
    folder = tmp_path / "whole"
    folder.mkdir()
    whole(folder, tmp_path)
    script = Path(__file__).with_name("pack_damaged.py")
    words = [sys.executable, str(script), str(folder), str(SEED), str(SECONDS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS + 120)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    print(len(found), Counter((one["source"], one["ended"]) for one in found))
    bad = [(wrong(one), one) for one in found if wrong(one)]
    assert not bad, bad[:3]
    assert {one["source"] for one in found} == {path.name for path in folder.iterdir()}
    assert {one["ended"] for one in found} == {"0", "2"}
