"""Which files of a folder are read, as which format, and what is said about the others."""

import gzip
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sets

from paceline.data import Shards, pack
from paceline.data.packing.export import convert


def parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.fixture
def exported(tmp_path):
    """Return a function that writes 6 samples in a format of other libraries."""
    pack(sets.arrays(6), tmp_path / "packed")

    def write(to):
        convert(tmp_path / "packed", tmp_path / to, to)
        return tmp_path / to

    return write


def test_files_of_spark_and_partitions_of_hive_are_one_dataset(tmp_path):
    for year in (2020, 2021):
        for month in (1, 2):
            part = tmp_path / f"x/year={year}/month={month}/part-0000.snappy.parquet"
            parquet(part, x=[[1.0 * year, month]])
    (tmp_path / "x/_SUCCESS").touch()
    (tmp_path / "x/year=2020/_metadata").write_bytes(b"x")
    (tmp_path / "x/year=2020/month=1/._part-0000.snappy.parquet").write_bytes(b"\0\5\26\7")
    assert pack(tmp_path / "x", tmp_path / "one").meta.samples == 4


@pytest.mark.parametrize("name", ["x.tfrecord-00000-of-00001", "train-00000-of-00001"])
def test_numbered_tfrecords(tmp_path, exported, name):
    file = tmp_path / "in" / name
    file.parent.mkdir()
    shutil.copy(exported("tfrecord") / "000000.tfrecord", file)
    assert pack(file, tmp_path / "one").meta.samples == 6
    (file.parent / "_SUCCESS").touch()
    (file.parent / f"._{name}").write_bytes(b"\0\5\26\7")
    assert pack(file.parent, tmp_path / "two").meta.samples == 6
    folder = file.parent / "again"
    folder.mkdir()
    shutil.copy(file, folder / name)
    with pytest.raises(
        ValueError, match=rf"{name}, a dataset of many samples, .*HINT: paceline pa"
    ):
        pack(file.parent, tmp_path / "three")


def test_hidden_files_beside_tars_are_left_out(tmp_path, exported):
    tars = exported("webdataset")
    (tars / "._000000.tar").write_bytes(b"\0\5\26\7")
    assert pack(tars, tmp_path / "one").meta.samples == 6


@pytest.mark.parametrize("name", ["a.parquet", "a.tar", "a.tar.gz", "a.tgz", "a.tfrecord.gz"])
def test_datasets_in_class_folders_are_no_samples(tmp_path, name):
    (tmp_path / "in/train").mkdir(parents=True)
    (tmp_path / "in/train" / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"contains train/{name}, a dataset of many samples"):
        pack(tmp_path / "in", tmp_path / "one")


@pytest.mark.parametrize("to", ["tfrecord", "webdataset"])
def test_compressed_files_are_named(tmp_path, exported, to):
    folder = exported(to)
    (file,) = [one for one in folder.iterdir() if one.suffix != ".txt"]
    packed = gzip.compress(file.read_bytes())
    told = r"is compressed with gzip\. HINT: decompress it first: gzip -d < .* > NEW$"
    for path in (file, tmp_path / f"{file.name}.gz", tmp_path / "x.tgz"):
        path.write_bytes(packed)
        with pytest.raises(ValueError, match=rf"^{path} {told}"):
            pack(path, tmp_path / "one")
    with pytest.raises(ValueError, match=rf"^{file} {told}"):
        pack(folder, tmp_path / "one")
    parquet(tmp_path / "x/0.parquet", x=[1.0])
    (tmp_path / "x/0.parquet").write_bytes(packed)
    with pytest.raises(ValueError, match=told):
        pack(tmp_path / "x", tmp_path / "one")


def test_null_in_a_list_of_integers_is_an_error(tmp_path):
    path = parquet(tmp_path / "x.parquet", x=[[2**53 + 1, 2], [2**53 + 1, None]])
    with pytest.raises(ValueError, match=r"row 1 .*a value is missing, and int64 has no NaN"):
        pack(path, tmp_path / "one")
    path = parquet(tmp_path / "y.parquet", x=[[0.5, None]])
    pack(path, tmp_path / "two")
    assert np.isnan(Shards(tmp_path / "two")[0]).tolist() == [False, True]


def test_columns_of_other_types_than_in_the_first_file_are_errors(tmp_path):
    parquet(tmp_path / "x/0.parquet", x=[[1.0]], y=[1])
    for other in ({"x": [[1.0]], "y": [0.7]}, {"x": [[1.0]]}, {"x": [[1]], "y": [1]}):
        parquet(tmp_path / "x/1.parquet", **other)
        with pytest.raises(
            ValueError, match=r"1\.parquet: the column [xy] is (double|missing|list)"
        ):
            pack(tmp_path / "x", tmp_path / "one")
