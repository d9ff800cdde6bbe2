"""Other formats: read into a packed dataset, written from it, and read again byte for byte."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import h5py
import lmdb
import netCDF4
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sets
import zarr

import paceline
from paceline.data import Loader, Shards, pack
from paceline.data.format.shard_format import load_meta
from paceline.data.packing import export
from paceline.data.packing.export import WRITABLE_FORMATS, convert
from paceline.data.shards import ScratchBuffer


def samples(folder):
    """Return the samples of a dataset, sorted: bytes, kind, shape, dtype, label and name."""
    shards = Shards(folder)
    found = []
    for i in range(len(shards)):
        row, data, label = shards.read_raw(i, ScratchBuffer())
        told = label.tobytes() if isinstance(label, np.ndarray) else label
        found.append((bytes(data), row.encoding, row.shape, row.dtype, told, shards.name(i)))
    return sorted(found, key=repr)


def ragged():
    for k in range(12):
        yield np.full((k % 3 + 1, 2), k, np.int16), k % 2


KINDS = {
    "images": lambda folder: (sets.images(folder / "in", 20), None),
    "classes": lambda folder: sets.arrays(17),
    "fields": lambda folder: (sets.arrays(9, (2, 3, 4), "float16")[0], np.random.rand(9, 5)),
    "unlabelled": lambda folder: (sets.arrays(8, (), "float64")[0], None),
    "flags": lambda folder: (sets.arrays(8)[0] > 0, np.arange(8)),
    "ragged": lambda folder: (ragged(), None),
}


@pytest.mark.parametrize("to", WRITABLE_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_exported_formats_round_trip_byte_for_byte(tmp_path, kind, to):
    source, labels = KINDS[kind](tmp_path)
    pack(source, tmp_path / "one", labels)
    report = convert(tmp_path / "one", tmp_path / "other", to, shard_bytes=2000)
    assert report.meta.samples == len(Shards(tmp_path / "one"))
    dest = tmp_path / "other"
    if to == "hdf5":
        dest = dest.rename(tmp_path / "other.h5")
    pack(dest, tmp_path / "again")
    one, again = Shards(tmp_path / "one").meta, Shards(tmp_path / "again").meta
    assert (one.label, one.classes, one.array) == (again.label, again.classes, again.array)
    assert one.packed["kind"] == again.packed["kind"]
    told = 6 if one.names else 5  # a format may invent names where there are none
    assert [each[:told] for each in samples(tmp_path / "again")] == [
        each[:told] for each in samples(tmp_path / "one")
    ]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_exported_formats_are_readable_by_their_libraries(tmp_path):
    x, y = sets.arrays(6)
    pack((x, y), tmp_path / "one")
    order = [int(a[0, 0]) for a, _ in map(Shards(tmp_path / "one").__getitem__, range(6))]
    for to in WRITABLE_FORMATS:
        convert(tmp_path / "one", tmp_path / to, to)
    with h5py.File(tmp_path / "hdf5") as file:
        assert np.array_equal(file["x"][:], x[order])
        assert np.array_equal(file["y"][:], y[order])
        assert file["x"].fletcher32
        assert file["x"].chunks == (1, 3, 4)
    with tarfile.open(tmp_path / "webdataset/000000.tar") as tar:
        names = tar.getnames()
        assert names[:3] == ["000000000.npy", "000000000.cls", "000000001.npy"]
        assert np.array_equal(np.load(io.BytesIO(tar.extractfile(names[0]).read())), x[order[0]])
        assert int(tar.extractfile(names[1]).read()) == y[order[0]]
    pages = lmdb.open(str(tmp_path / "lmdb"), readonly=True)
    with pages.begin() as view:
        assert pages.stat()["entries"] == 12
        assert int(view.get(b"000000003.cls")) == y[order[3]]
    pages.close()


def test_hdf5_files_of_other_tools(tmp_path):
    bands, kinds = np.random.rand(40, 3, 4, 4).astype(">f4"), np.arange(40) % 3
    with h5py.File(tmp_path / "tiles.h5", "w") as file:
        group = file.create_group("north")
        group.create_dataset("bands", data=bands, chunks=(16, 3, 4, 4), compression="gzip")
        group["kind"] = kinds
        file["x"], file["z"] = bands[:, 0], bands[:, 1] + 1
    path = tmp_path / "tiles.h5"
    pack(f"{path}:north/bands", tmp_path / "one", "north/kind")
    shards = Shards(tmp_path / "one")
    assert shards.meta.array.dtype == "float32"
    for i in range(40):
        array, label = shards[i]
        at = int(np.where((bands == array).all((1, 2, 3)))[0][0])
        assert label == kinds[at]
    pack(f"{path}:x,z", tmp_path / "two")
    both, _ = Shards(tmp_path / "two"), None
    assert both.meta.array.shape == (2, 4, 4)
    assert (both[0][1] - both[0][0]).min() > -1
    assert len(Shards(tmp_path / "one").labels()) == 40
    with pytest.raises(ValueError, match=r"has no 'bands'; it has north/bands \(40, 3, 4, 4\)"):
        pack(f"{path}:bands", tmp_path / "three")


def test_netcdf_with_missing_and_scaled_values(tmp_path):
    path = tmp_path / "sea.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        file.createDimension("lat", 4)
        file.createVariable("time", "f8", ("time",))[:] = np.arange(6)
        sst = file.createVariable("sst", "i2", ("time", "lat"), fill_value=-999)
        sst.scale_factor, sst.add_offset = 0.5, 10.0
        sst[:] = np.ma.masked_equal(np.arange(24.0).reshape(6, 4), 5.0)
    pack(path, tmp_path / "one")
    shards = Shards(tmp_path / "one")
    values = np.stack([shards[i] for i in range(6)])
    assert values.shape == (6, 4)
    assert np.isnan(values).sum() == 1
    assert sorted(values[~np.isnan(values)]) == pytest.approx([v for v in range(24) if v != 5])


def test_zarr_arrays_of_other_tools(tmp_path):
    group = zarr.open_group(str(tmp_path / "cubes.zarr"), mode="w")
    data = np.arange(50 * 6, dtype="int32").reshape(50, 2, 3)
    group.create_array("images", data=data, chunks=(8, 2, 3))
    group.create_array("labels", data=np.arange(50) % 5, chunks=(50,))
    pack(tmp_path / "cubes.zarr", tmp_path / "one")
    shards = Shards(tmp_path / "one")
    assert len(shards) == 50
    for i in range(50):
        array, label = shards[i]
        assert label == array[0, 0] // 6 % 5
    alone = zarr.create_array(str(tmp_path / "alone"), data=data)
    assert alone.shape == data.shape
    pack(tmp_path / "alone", tmp_path / "two")
    assert len(Shards(tmp_path / "two")) == 50


def test_parquet_files_of_other_tools(tmp_path):
    files = sorted(sets.images(tmp_path / "in", 9).rglob("*.jpg"))
    rows = [{"bytes": path.read_bytes(), "path": path.name} for path in files]
    told = {"info": {"features": {"label": {"names": ["ant", "bee"]}}}}
    table = pyarrow.table({"image": rows, "label": [k % 2 for k in range(len(rows))]})
    table = table.replace_schema_metadata({"huggingface": json.dumps(told)})
    (tmp_path / "parts").mkdir()
    pyarrow.parquet.write_table(table.slice(0, 4), tmp_path / "parts/0.parquet")
    pyarrow.parquet.write_table(table.slice(4), tmp_path / "parts/1.parquet")
    pack(tmp_path / "parts", tmp_path / "one")
    shards = Shards(tmp_path / "one")
    assert (shards.meta.packed["kind"], shards.meta.classes) == ("images", ["ant", "bee"])
    assert sorted(each[0] for each in samples(tmp_path / "one")) == sorted(
        row["bytes"] for row in rows
    )
    lists = pyarrow.table(
        {"x": [[[k, 1.5], [0.0, k]] for k in range(7)], "y": [[0.5, k] for k in range(7)]}
    )
    pyarrow.parquet.write_table(lists, tmp_path / "lists.parquet")
    pack(tmp_path / "lists.parquet", tmp_path / "two")
    array, label = Shards(tmp_path / "two")[0]
    assert array.shape == (2, 2)
    assert label.tolist() == [0.5, array[0, 0]]


def test_tar_and_lmdb_files_of_other_tools(tmp_path):
    images = sets.images(tmp_path / "in", 6)
    with tarfile.open(tmp_path / "some.tar", "w") as tar:
        for k, path in enumerate(sorted(images.rglob("*.jpg"))):
            (tmp_path / "cls").write_text(path.parent.name)
            tar.add(path, f"train/{k}.jpg")
            tar.add(tmp_path / "cls", f"train/{k}.cls")
            tar.add(tmp_path / "cls", f"train/{k}.txt")
    report = pack(tmp_path / "some.tar", tmp_path / "one")
    assert report.meta.classes == list(sets.CLASSES)
    assert report.notes == ["members with these extensions are left out: txt"]
    assert Shards(tmp_path / "one").name(0).startswith("train/")
    pages = lmdb.open(str(tmp_path / "bare.lmdb"), subdir=False)
    with pages.begin(write=True) as view:
        for path in images.rglob("*.jpg"):
            view.put(path.stem.encode(), path.read_bytes())
        view.put(b"__len__", b"6")
    pages.close()
    report = pack(tmp_path / "bare.lmdb", tmp_path / "two")
    assert (report.meta.samples, report.meta.packed["kind"], report.meta.label) == (
        6,
        "images",
        None,
    )


def _cut(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3 + 5])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


BROKEN = [
    ("webdataset", "000000.tar", _cut, r"is truncated|can't be read as a tar"),
    ("tfrecord", "000000.tfrecord", _cut, r"is truncated: [\d,]+ bytes of at least|no TFRecord at"),
    ("tfrecord", "000000.tfrecord", _flip, r"a byte has changed|no TFRecord at byte"),
    ("lmdb", "data.mdb", _cut, r"is truncated: .* HINT: copy it again"),
    ("hdf5", "", _cut, r"can't be read as HDF5"),
    ("hdf5", "", _flip, r"sample \d+.*[Cc]an't"),
]


@pytest.mark.parametrize(("to", "inside", "damage", "said"), BROKEN)
def test_damaged_file_is_reported(tmp_path, to, inside, damage, said):
    x, y = sets.arrays(30, (40, 40))
    pack((x, y), tmp_path / "one")
    dest = tmp_path / ("other.h5" if to == "hdf5" else "other")
    convert(tmp_path / "one", dest, to)
    damage(dest / inside if inside else dest)
    with pytest.raises(ValueError, match=said):
        pack(dest, tmp_path / "again")


def _tar(path, members=6):
    with tarfile.open(path, "w") as tar:
        for k in range(members):
            made = io.BytesIO()
            np.save(made, np.full(200, k))
            one = tarfile.TarInfo(f"{k}.npy")
            one.size = len(made.getvalue())
            tar.addfile(one, io.BytesIO(made.getvalue()))
    return path


def test_truncated_tar_is_reported(tmp_path):
    each = 512 + 2048  # bytes of a member with its header
    whole = _tar(tmp_path / "t.tar").read_bytes()
    assert len(whole) % 10240 == 0
    damaged = bytearray(whole)
    damaged[3 * each] ^= 1
    (tmp_path / "t.tar").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"t\.tar has no tar member at byte 7,680\. HINT: copy"):
        pack(tmp_path / "t.tar", tmp_path / "one")
    (tmp_path / "t.tar").write_bytes(whole[: 4 * each])
    with pytest.raises(ValueError, match=r"is truncated: it has no end mark"):
        pack(tmp_path / "t.tar", tmp_path / "one")
    (tmp_path / "t.tar").write_bytes(whole[: 4 * each] + bytes(20480))
    report = pack(tmp_path / "t.tar", tmp_path / "one")
    assert report.meta.samples == 4
    assert report.notes == [f"{tmp_path}/t.tar ends with 20,480 zeros: members may be missing"]


@pytest.mark.parametrize("kind", ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"])
@pytest.mark.parametrize("variables", [1, 2])
def test_truncated_netcdf3_is_reported(tmp_path, kind, variables):
    path = tmp_path / "t.nc"
    with netCDF4.Dataset(path, "w", format=kind) as file:
        file.title = "cut"
        file.createDimension("time", None)
        file.createDimension("place", 5)
        fixed = file.createVariable("where", "f8", ("place",))
        fixed.units = "m"
        for k in range(variables):
            made = file.createVariable(f"v{k}", "i2", ("time", "place"))
            made[:] = np.arange(50).reshape(10, 5)
        fixed[:] = np.arange(5)
    assert pack(f"{path}:v0", tmp_path / "one").notes == []
    whole = path.read_bytes()
    # Padding of the last record, which may be missing in a file.
    padding = 2 if variables > 1 else 0
    path.write_bytes(whole[: -1 - padding])
    with pytest.raises(ValueError, match=r"t\.nc is truncated: it has [\d,]+ bytes of at least"):
        pack(f"{path}:v0", tmp_path / "two")
    path.write_bytes(whole + whole[-100:])
    report = pack(f"{path}:v0", tmp_path / "two")
    assert report.notes == [f"{path} is longer than its 10 records: records may be missing"]


@pytest.mark.parametrize("kind", ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"])
def test_netcdf3_with_a_damaged_dimension_is_reported(tmp_path, kind):
    """A length of an unlimited dimension is 0 in the header; damage makes it a fixed dimension."""
    path = tmp_path / "t.nc"
    with netCDF4.Dataset(path, "w", format=kind) as file:
        file.createDimension("time", None)
        file.createDimension("place", 5)
        file.createVariable("v", "f4", ("time", "place"))[:] = np.arange(50).reshape(10, 5)
    data, width = bytearray(path.read_bytes()), 8 if kind == "NETCDF3_64BIT_DATA" else 4
    at = data.index(b"time") + len(b"time")
    data[at + width - 1] = 4
    path.write_bytes(data)
    report = pack(path, tmp_path / "set")
    assert load_meta(tmp_path / "set").samples == 4
    assert report.notes == [f"{path} is longer than its header says: values may be missing"]


def test_missing_chunks_are_reported(tmp_path):
    group = zarr.open_group(str(tmp_path / "z.zarr"), mode="w")
    group.create_array("x", data=np.ones((40, 3)), chunks=(8, 3))
    assert pack(tmp_path / "z.zarr", tmp_path / "whole").notes == []
    (tmp_path / "z.zarr/x/c/2/0").unlink()
    report = pack(tmp_path / "z.zarr", tmp_path / "one")
    assert report.notes == [
        f"{tmp_path}/z.zarr:x: 1 of 5 chunks are missing, and are read as fill values"
    ]
    group.create_array("y", data=np.arange(40), chunks=(8,))
    (tmp_path / "z.zarr/x/zarr.json").unlink()
    report = pack(tmp_path / "z.zarr", tmp_path / "three")
    assert report.meta.array.shape == ()
    assert "Object at x is not recognized" in report.notes[0]
    with h5py.File(tmp_path / "h.h5", "w") as file:
        file.create_dataset("x", (40, 3), "f4", chunks=(8, 3))[:16] = 1
    report = pack(tmp_path / "h.h5", tmp_path / "two")
    assert report.notes == [
        f"{tmp_path}/h.h5:x: 3 of 5 chunks are missing, and are read as fill values"
    ]
    with pytest.warns(UserWarning, match=r"Loader: .*h\.h5:x: 3 of 5 chunks are missing"):
        Loader(tmp_path / "h.h5")


def test_empty_samples(tmp_path):
    with h5py.File(tmp_path / "h.h5", "w") as file:
        x = file.create_dataset("x", 3, h5py.vlen_dtype(np.uint8))
        x[0], x[2] = np.arange(5), np.arange(7)
    with pytest.raises(ValueError, match=r"sample 1: is empty \(0 bytes\)"):
        pack(tmp_path / "h.h5", tmp_path / "one")
    pack(np.zeros((3, 0), np.float32), tmp_path / "two")
    assert [len(one) for one in Shards(tmp_path / "two")] == [0, 0, 0]
    assert [x.shape for x in Loader(tmp_path / "two", 2)] == [(2, 0), (1, 0)]


def test_ambiguous_source_is_rejected_with_hint(tmp_path):
    with h5py.File(tmp_path / "two.h5", "w") as file:
        file["a"], file["b"] = np.zeros((3, 2)), np.zeros((3, 2))
    with pytest.raises(ValueError, match=r"it has a \(3, 2\), b \(3, 2\)\. HINT: .*two\.h5:NAME"):
        pack(tmp_path / "two.h5", tmp_path / "one")
    table = pyarrow.table({"p": [1.0], "q": [2.0]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"has p, q\. HINT: .*t\.parquet:COLUMN"):
        pack(tmp_path / "t.parquet", tmp_path / "one")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for end in ("jpg", "png", "cls"):
            tar.add(tmp_path / "two.h5", f"0.{end}")
    with pytest.raises(ValueError, match=r"0 has \.cls, \.jpg, \.png\. HINT: keep one member"):
        pack(tmp_path / "t.tar", tmp_path / "one")
    pack(np.zeros((3, 2)), tmp_path / "set")
    with pytest.raises(ValueError, match=r"--to must be hdf5, lmdb, .*; this is 'parquet'\. HINT"):
        convert(tmp_path / "set", tmp_path / "out", "parquet")
    with pytest.raises(ValueError, match=r"exists\. HINT: choose another name"):
        convert(tmp_path / "set", tmp_path / "t.tar", "webdataset")
    assert not (tmp_path / "one").exists() or not any((tmp_path / "one").iterdir())


def command(*words):
    made = [sys.executable, "-m", "paceline", "pack", *map(str, words)]
    env = {"PYTHONPATH": str(Path(paceline.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    return subprocess.run(made, capture_output=True, text=True, env=env)


@pytest.mark.long
def test_pack_command_exports_to_another_format(tmp_path):
    images = sets.images(tmp_path / "in", 12)
    done = command(images, tmp_path / "tars", "--to", "webdataset", "--resize", "10", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 12
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "tars"]
    done = command(tmp_path / "tars", tmp_path / "x.h5", "--to", "hdf5")
    assert done.returncode == 0, done.stderr
    again = command(tmp_path / "tars", tmp_path / "x.h5", "--to", "hdf5")
    assert again.returncode != 0
    assert "exists. HINT: choose another name, or replace it: fresh=True (--fresh)" in again.stderr
    fresh = command(tmp_path / "tars", tmp_path / "x.h5", "--to", "hdf5", "--fresh")
    assert fresh.returncode == 0, fresh.stderr
    kept = command(tmp_path / "tars", images, "--to", "webdataset", "--fresh")
    assert "exists and is not in the format webdataset. HINT: choose another name" in kept.stderr
    assert len(list(images.rglob("*.*"))) == 12


def test_unfinished_export_is_in_a_folder_that_only_its_user_can_write_to(tmp_path):
    """The folder of the output is writable for other users, and one of them has made a link."""
    x, _ = sets.arrays(8)
    pack(x, tmp_path / "packed")
    (tmp_path / "kept").write_text("private")
    (tmp_path / ".x.h5.part").symlink_to(tmp_path / "kept")
    seen = []
    export.export(
        tmp_path / "packed",
        tmp_path / "x.h5",
        "hdf5",
        prepare=lambda part: seen.append((part, part.parent.stat().st_mode & 0o777)),
    )
    assert seen == [(tmp_path / ".x.h5.part" / "x.h5", 0o700)]
    assert not os.path.lexists(tmp_path / ".x.h5.part")
    assert (tmp_path / "kept").read_text() == "private"
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"].shape == x.shape


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("name", [".x.h5.part", ".x.h5.packed"])
def test_export_refuses_an_unfinished_output_of_another_user(tmp_path, name):
    x, _ = sets.arrays(8)
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ZeroDivisionError):
        convert(tmp_path / "x.npy", tmp_path / "x.h5", "hdf5", prepare=lambda part: 1 / 0)
    (tmp_path / ".x.h5.part").mkdir(exist_ok=True)
    os.chown(tmp_path / name, 4321, -1)
    with pytest.raises(ValueError, match=rf"can't be written: .*{name}: belongs to user 4321") as e:
        convert(tmp_path / "x.npy", tmp_path / "x.h5", "hdf5")
    assert "Nothing was written. HINT: choose a DEST other than" in str(e.value)
    assert not (tmp_path / "x.h5").exists()
    assert (tmp_path / name).exists()


def test_interrupted_export_resumes_only_with_same_source(tmp_path):
    x, _ = sets.arrays(8)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "z.npy", x + 100)
    stopped = pytest.MonkeyPatch()
    stopped.setattr(export, "export", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(tmp_path / "x.npy", tmp_path / "out", "webdataset")
    stopped.undo()
    assert (tmp_path / ".out.packed/paceline.json").exists()
    convert(tmp_path / "z.npy", tmp_path / "out", "webdataset")
    pack(tmp_path / "out", tmp_path / "again")
    assert min(float(a[0, 0]) for a in Shards(tmp_path / "again")) == 100
    assert not (tmp_path / ".out.packed").exists()
