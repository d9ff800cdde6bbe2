"""Datasets whose links and references lead to files of the user: nothing outside is read."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import h5py
import netCDF4
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zarr

from paceline.data import DataError, Files, Loader, Shards, pack
from paceline.data.format.shard_format import load_meta, save_meta
from paceline.data.loading.stored_arrays import StoredArrays

OUTSIDE = r"refers to .*/\.?secret.*, which is no file of the dataset.*HINT: --follow-links"
SECRET = np.arange(64, dtype="u1")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of a dataset, beside files of the user, one of which is hidden in the folder."""
    made = tmp_path / "set"
    made.mkdir()
    for secret in (tmp_path / "secret", tmp_path / "cwd" / "secret.raw", made / ".secret"):
        secret.parent.mkdir(exist_ok=True)
        secret.write_bytes(SECRET.tobytes())
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = SECRET.reshape(4, 16)
    monkeypatch.chdir(tmp_path / "cwd")
    return made


def virtual(path: Path, source: str, name: str = "x") -> None:
    layout = h5py.VirtualLayout((4, 16), "u1")
    layout[:] = h5py.VirtualSource(source, name, (4, 16))
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset("x", layout)


def numbered(path: Path, source: str) -> None:
    """Create a virtual dataset of all files of a pattern, in which %b is the number of a block."""
    h5s, layout = h5py.h5s, h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5s.create_simple((4, 16), (h5s.UNLIMITED, 16))
    blocks = space.copy()
    blocks.select_hyperslab((0, 0), (h5s.UNLIMITED, 1), (4, 16), (4, 16))
    layout.set_virtual(blocks, source.encode(), b"x", h5s.create_simple((4, 16)))
    with h5py.File(path, "a") as file:
        h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, space, layout)


def external(path: Path, file_name: object) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (4, 16), "u1", external=[(str(file_name), 0, 64)])


def _absolute(folder):
    external(folder / "a.h5", folder.parent / "secret")


def _with_dots(folder):
    virtual(folder / "a.h5", "../secret.h5")


def _in_working_directory(folder):
    external(folder / "a.h5", "secret.raw")  # HDF5 searches it there, and not beside the file


def _hidden(folder):
    external(folder / "a.h5", folder / ".secret")


def _behind_link(folder):
    (folder / "b.h5").symlink_to("../secret.h5")
    virtual(folder / "a.h5", "b.h5")


def _numbered(folder):
    (folder / "b-0.h5").symlink_to("../secret.h5")
    numbered(folder / "a.h5", "b-%b.h5")


def _behind_file(folder):
    """A virtual dataset of a file that is one of the user's by an external link."""
    with h5py.File(folder / "b.h5", "w") as file:
        file["x"] = h5py.ExternalLink("../secret.h5", "x")
    virtual(folder / "a.h5", "b.h5")


def _behind_own_link(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file["link"] = h5py.ExternalLink("../secret.h5", "x")
    virtual(folder / "a.h5", ".", "link")


@pytest.mark.parametrize(
    "make",
    [
        *(_absolute, _with_dots, _in_working_directory, _hidden),
        *(_behind_link, _numbered, _behind_file, _behind_own_link),
    ],
)
@pytest.mark.parametrize("suffix", ["h5", "nc"])
def test_hdf5_that_refers_to_files_outside_is_an_error(folder, make, suffix):
    make(folder)
    source = folder / f"a.{suffix}"
    (folder / "a.h5").rename(source)
    with pytest.raises(ValueError, match=OUTSIDE) as error:
        pack(f"{source}:x", folder.parent / "out")
    assert (
        f"a.{suffix}:x" in str(error.value)
        or "b.h5:x" in str(error.value)
        or (f"a.{suffix}:link" in str(error.value))
    )
    if suffix == "h5":
        with pytest.raises(ValueError, match=OUTSIDE):
            Loader(f"{source}:x", batch_size=2)
        pack(f"{source}:x", folder.parent / "out", follow_links=True)
        packed = Shards(folder.parent / "out")
        assert sorted(packed[i].sum() for i in range(4)) == sorted(SECRET.reshape(4, 16).sum(1))
        assert len(StoredArrays(f"{source}:x", follow_links=True)) == 4


def test_netcdf_variable_behind_external_link_is_an_error(folder):
    """The netCDF library follows links when it opens a file, whichever variable is read."""
    with netCDF4.Dataset(folder / "a.nc", "w") as file:
        file.createDimension("n", 4)
        file.createVariable("x", "f4", ("n",))[:] = 1
    with h5py.File(folder / "a.nc", "a") as file:
        file["z"] = h5py.ExternalLink(str(folder.parent / "secret.h5"), "x")
    with pytest.raises(ValueError, match=rf"a\.nc:z {OUTSIDE}"):
        pack(f"{folder / 'a.nc'}:z", folder.parent / "out")


def test_hdf5_that_refers_to_files_of_its_folder_is_read(folder):
    (folder / "parts").mkdir()
    shutil.copy(folder.parent / "secret.h5", folder / "parts" / "b-0.h5")
    numbered(folder / "a.h5", "parts/b-%b.h5")
    with h5py.File(folder / "a.h5", "a") as file:
        file["elsewhere"] = h5py.ExternalLink("../secret.h5", "x")  # not read
    assert pack(f"{folder / 'a.h5'}:x", folder.parent / "out").meta.samples == 4


def test_shapes_behind_a_link_are_not_read(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        x = file.create_dataset("x", 2, h5py.vlen_dtype("f4"))
        x[0], x[1] = np.ones(2, "f4"), np.ones(3, "f4")
        file["shapes"] = h5py.ExternalLink("../secret.h5", "x")
    pack(folder / "a.h5", folder.parent / "out")
    assert sorted(len(Shards(folder.parent / "out")[i]) for i in range(2)) == [2, 3]


def _files(folder):
    (folder / "b.npy").symlink_to("../secret.npy")


def _folders(folder):
    (folder.parent / "secrets").mkdir()
    (folder.parent / "secrets" / "secret.npy").write_bytes(b"")
    (folder / "b").symlink_to("../secrets")


def _tar(folder):
    (folder / "a.npy").unlink()
    (folder / "a.tar").symlink_to("../secret")


def _parquet(folder):
    (folder / "a.npy").unlink()
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), folder / "a.parquet")
    (folder / "b.parquet").symlink_to("../secret")


def _lmdb(folder):
    (folder / "data.mdb").symlink_to("../secret")


def _class_names(folder):
    (folder / "a.npy").rename(folder / "a.tfrecord")
    (folder / "classes.txt").symlink_to("../secret")


def _zarr_chunk(folder):
    (folder / "a.npy").unlink()
    zarr.create_array(str(folder), shape=(4, 2), chunks=(2, 2), dtype="f4")[:] = 1
    (folder / "c" / "0" / "0").unlink()
    (folder / "c" / "0" / "0").symlink_to(folder.parent / "secret")


@pytest.mark.parametrize(
    "make", [_files, _folders, _tar, _parquet, _lmdb, _class_names, _zarr_chunk]
)
def test_link_out_of_the_folder_is_an_error(folder, make):
    np.save(folder / "a.npy", SECRET)
    make(folder)
    with pytest.raises(ValueError, match=rf"the link .* {OUTSIDE}"):
        pack(folder, folder.parent / "out", on_error="skip")


def test_class_names_beside_a_file_that_are_a_link_out_of_its_folder_are_an_error(folder):
    np.save(folder / "a.npy", SECRET)
    _class_names(folder)
    with pytest.raises(ValueError, match=rf"the link .*/classes\.txt {OUTSIDE}"):
        pack(folder / "a.tfrecord", folder.parent / "out")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "a.bin"])
def test_links_in_a_tar_are_left_out_with_a_note(folder, kind, target):
    with tarfile.open(folder / "x.tar", "w") as tar:
        for name in ("a.bin", "b.bin"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"data"))
        link = tarfile.TarInfo("c.bin")
        link.type, link.linkname = kind, target
        tar.addfile(link)
    report = pack(folder / "x.tar", folder.parent / "out")
    assert report.meta.samples == 2
    assert "x.tar: 1 link left out" in report.notes[0]


def test_links_within_the_folder_are_read(folder):
    for name in ("a", ".b"):
        np.save(folder / f"{name}.npy", SECRET)
    (folder / "c.npy").symlink_to(".b.npy")  # as git-annex has them
    (folder.parent / "link").symlink_to(folder)  # the user named it
    assert pack(folder.parent / "link", folder.parent / "out").meta.samples == 2
    assert len(Files(folder.parent / "link")) == 2


@pytest.mark.parametrize("named", ["{}/secret.npy", "../secret.npy", ".up/secret.npy", ".b.npy"])
def test_label_table_that_names_files_outside_is_an_error(folder, named):
    np.save(folder / "a.npy", SECRET)
    np.save(folder.parent / "secret.npy", SECRET)
    (folder / ".up").symlink_to("..")  # hidden files are not listed, but a table can name them
    (folder / ".b.npy").symlink_to("../secret.npy")
    (folder.parent / "labels.csv").write_text(f"a.npy,1\n{named.format(folder.parent)},2\n")
    with pytest.raises(ValueError, match=OUTSIDE):
        pack(folder, folder.parent / "out", folder.parent / "labels.csv")


def test_zarr_group_that_names_arrays_outside_is_an_error(folder):
    """Zarr's list of a group's arrays, in which each name is a path below the group."""
    for path in (folder / "a.zarr", folder.parent / "secret.zarr"):
        group = zarr.open_group(str(path), mode="w")
        group.create_array("x", data=np.arange(4))
    zarr.consolidate_metadata(str(folder / "a.zarr"))
    meta = json.loads((folder / "a.zarr" / "zarr.json").read_text())
    arrays = meta["consolidated_metadata"]["metadata"]
    for name in ("../../secret.zarr/x", str(folder.parent / "secret.zarr" / "x")):
        meta["consolidated_metadata"]["metadata"] = {name: arrays["x"]}
        (folder / "a.zarr" / "zarr.json").write_text(json.dumps(meta))
        with pytest.raises(ValueError, match=r"a\.zarr"):
            pack(f"{folder / 'a.zarr'}:{name}", folder.parent / "out")


def test_command_and_its_ranks_follow_links_when_asked(folder):
    np.save(folder.parent / "secret.npy", SECRET)
    np.save(folder / "a.npy", SECRET)
    (folder / "b.npy").symlink_to("../secret.npy")
    words = [sys.executable, "-P", "-m", "paceline", "pack", folder, folder.parent / "out"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"the link {folder / 'b.npy'} refers to {folder.parent / 'secret.npy'}" in done.stderr
    done = subprocess.run([*words, "--follow-links"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(Shards(folder.parent / "out")) == 2


def _never_written(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", (1 << 40, 4), "f4", chunks=(1024, 4))
    return folder / "a.h5"


def _never_allocated(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", (1 << 40, 4), "f4")
    return folder / "a.h5"


def _short_external(folder):
    (folder / "raw").write_bytes(bytes(64))
    with h5py.File(folder / "a.h5", "w") as file:
        whole = [(str(folder / "raw"), 0, 16 << 40)]
        file.create_dataset("x", (1 << 40, 4), "f4", external=whole)
    return folder / "a.h5"


def _virtual_of_nothing(folder):
    layout = h5py.VirtualLayout((1 << 40, 4), "f4")
    layout[:4] = h5py.VirtualSource("b.h5", "x", (4, 4))
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    return folder / "a.h5"


def _empty_rows(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", (1 << 40, 0), "f4")
    return folder / "a.h5"


def _empty_rows_of_npy(folder):
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 0), }"
    data = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + head.ljust(117).encode() + b"\n"
    (folder / "a.npy").write_bytes(data)
    return folder / "a.npy"


def _zarr_without_chunks(folder):
    zarr.create_array(str(folder / "a.zarr"), shape=(1 << 40, 4), chunks=(1 << 20, 4), dtype="f4")
    return folder / "a.zarr"


def _netcdf(folder):
    with netCDF4.Dataset(folder / "a.nc", "w") as file:
        file.createDimension("n", 1 << 40)
        file.createVariable("x", "f4", ("n",), chunksizes=(1024,))
    return folder / "a.nc"


@pytest.mark.parametrize(
    "make",
    [
        *(_never_written, _never_allocated, _short_external, _virtual_of_nothing, _empty_rows),
        *(_empty_rows_of_npy, _zarr_without_chunks, _netcdf),
    ],
)
def test_array_much_larger_than_its_file_is_an_error(folder, make):
    source = make(folder)
    with pytest.raises(ValueError, match=r"would be packed as [\d,]+ bytes, but only [\d,]+ bytes"):
        pack(source, folder.parent / "out")
    assert not list((folder.parent / "out").glob("*.bin"))


def test_names_of_a_packed_dataset_without_checksums_are_not_read_from_outside(folder):
    """An older dataset: paceline.json has no checksums of the index and the names."""
    np.save(folder / "a.npy", SECRET)
    np.save(folder / "b.npy", SECRET)
    out = folder.parent / "out"
    pack(folder, out)
    meta = load_meta(out)
    meta.files = {}
    save_meta(meta, out)
    assert Shards(out).name(0) in ("a.npy", "b.npy")
    (out / "names.txt").unlink()
    (out / "names.txt").symlink_to("../secret.txt")
    (folder.parent / "secret.txt").write_text("user\npassword\n")
    with pytest.raises(DataError, match=r"is a link to .*/secret\.txt"):
        pack(out, folder.parent / "again")
