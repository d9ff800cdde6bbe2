"""Files of other formats from an attacker: no hang, no traceback, bounded memory."""

import io
import os
import signal
import tarfile
import types

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zarr

from paceline.data import Shards, pack
from paceline.data.sources.formats import netcdf, open_source, zarrs
from paceline.data.sources.formats.tfrecord import FOOTER, HEADER, _example, _masked_crc
from paceline.security.files import InvalidFileError


@pytest.fixture(autouse=True)
def _no_hang():
    """Let an endless wait for a file end the test instead of the test run."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("name", ["a.tar", "a.tfrecord", "a.parquet", "data.mdb", ".zarray"])
def test_fifo_in_folder_of_other_format_is_rejected(tmp_path, name):
    folder = tmp_path / "in"
    folder.mkdir()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match="is a FIFO and no regular file"):
        pack(folder, tmp_path / "out")


def record(content: bytes, length: int | None = None) -> bytes:
    head = (len(content) if length is None else length).to_bytes(8, "little")
    return head + FOOTER.pack(_masked_crc(head)) + content + FOOTER.pack(_masked_crc(content))


def example(**values) -> bytes:
    made = _example()()
    for name, value in values.items():
        name = name.replace("_", "/")
        if isinstance(value, bytes):
            made.features.feature[name].bytes_list.value.append(value)
        else:
            made.features.feature[name].int64_list.value.extend(value)
    return made.SerializeToString()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            example(x=bytes(8), x_dtype=b"float64", x_shape=[1 << 40]),
            "8 bytes of 8,796,093,022,208",
        ),
        (example(x=bytes(8), x_dtype=b"object", x_shape=[1]), "is object of"),
        (example(x=bytes(8), x_dtype=b"f8,f8", x_shape=[1]), "is f8,f8 of"),
        (example(x=bytes(8), x_dtype=b"float64", x_shape=[-1]), "is float64 of"),
        (example(x=bytes(8), x_shape=[1], x_dtype=b""), "is  of"),
        (b"\xff" * 40, "is not a tf.train.Example"),
    ],
    ids=["large", "object", "record", "negative", "no dtype", "no message"],
)
def test_invalid_tfrecord_features_are_rejected(tmp_path, content, said):
    (tmp_path / "x.tfrecord").write_bytes(record(content))
    with pytest.raises(ValueError, match=said):
        pack(tmp_path / "x.tfrecord", tmp_path / "out")


def test_excessive_tfrecord_length_is_rejected(tmp_path):
    """A sparse file of 1 TiB with one record."""
    path = tmp_path / "x.tfrecord"
    path.write_bytes(record(b"", 1 << 40)[: HEADER.size])
    os.truncate(path, (1 << 40) + 100)
    with pytest.raises(ValueError, match=r"the record at byte .* has 1,099,511,627,776 bytes"):
        pack(path, tmp_path / "out")


def tar_head(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    head = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    head[124:136], head[156:157], head[148:156] = size, kind, b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (tar_head("a.npy", b"\xff" + (-1024 & (1 << 88) - 1).to_bytes(11, "big")), "leads to byte"),
        (
            tar_head("a.npy", b"\x80" + (1 << 80).to_bytes(11, "big")),
            "leads to byte|unexpected end",
        ),
        (tar_head("a", b"\x80" + (1 << 36).to_bytes(11, "big"), b"x"), "a header of 68,719,"),
        (tar_head("a", b"\x80" + (1 << 36).to_bytes(11, "big"), b"L"), "a header of 68,719,"),
        (
            tar_head("a", b"\xff" + (-512 & (1 << 88) - 1).to_bytes(11, "big"), b"L"),
            "a header of -",
        ),
        (
            2000 * (tar_head("a", b"00000000000\0", b"x")),
            "can't be read as a tar|contains no samples",
        ),
    ],
)
def test_invalid_tar_headers_are_rejected(tmp_path, head, said):
    (tmp_path / "x.tar").write_bytes(head + bytes(10240))
    with pytest.raises(ValueError, match=said):
        pack(tmp_path / "x.tar", tmp_path / "out")


def test_sparse_tar_member_is_rejected(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        one = tarfile.TarInfo("a.npy")
        one.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        one.pax_headers |= {"GNU.sparse.name": "a.npy", "GNU.sparse.realsize": str(1 << 40)}
        content = b"1\n0\n512\n".ljust(512, b"\0") + bytes(512)
        one.size = len(content)
        tar.addfile(one, io.BytesIO(content))
    with pytest.raises(ValueError, match="is a sparse file"):
        pack(tmp_path / "x.tar", tmp_path / "out")


def test_class_list_that_is_a_fifo_is_rejected(tmp_path):
    (tmp_path / "x.tfrecord").write_bytes(record(example(x=b"a", label=[1])))
    os.mkfifo(tmp_path / "classes.txt")
    with pytest.raises(ValueError, match=r"classes\.txt: is a FIFO"):
        pack(tmp_path / "x.tfrecord", tmp_path / "out")


def test_oversized_hdf5_rows_and_chunks_are_rejected(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("row", (2, 1 << 40), "f4", chunks=(1, 1 << 20))
        file.create_dataset("chunk", (1 << 20, 1 << 20), "f4", chunks=(1 << 20, 1))
        file.create_dataset("many", (1 << 40,), "u1", chunks=(1 << 10,))
        file["pairs"] = np.zeros(2, "f4,f4")
    for name in ("row", "chunk"):
        with pytest.raises(ValueError, match="bytes are read at once"):
            pack(f"{tmp_path / 'x.h5'}:{name}", tmp_path / "out")
    with pytest.raises(ValueError, match="is not a numeric array"):
        pack(f"{tmp_path / 'x.h5'}:pairs", tmp_path / "out")


def test_hdf5_with_values_in_external_fifo_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "raw")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (4, 2), "f4", external=[("raw", 0, 32)])
        layout = h5py.VirtualLayout((4, 2), "f4")
        layout[:] = h5py.VirtualSource("raw", "x", (4, 2))
        file.create_virtual_dataset("v", layout)
    for name in ("x", "v"):
        with pytest.raises(ValueError, match=r"has its values in .*/raw, which can't be read"):
            pack(f"{tmp_path / 'x.h5'}:{name}", tmp_path / "out")


def test_zarr_with_fifo_chunk_or_pickle_codec_is_rejected(tmp_path):
    made = zarr.create_array(str(tmp_path / "x.zarr"), shape=(4, 2), chunks=(2, 2), dtype="f4")
    made[:] = 1
    chunk = next(p for p in (tmp_path / "x.zarr").rglob("0") if p.is_file())
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(ValueError, match="is a FIFO and no regular file"):
        pack(tmp_path / "x.zarr", tmp_path / "out")
    pickle = types.SimpleNamespace(codec_id="pickle")
    for hostile in ({"filters": [pickle]}, {"compressor": pickle}):
        with pytest.raises(ValueError, match="has the codec pickle, which runs code from the file"):
            zarrs.check_codecs(types.SimpleNamespace(**hostile), "x.zarr")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"CDF", ""),
        (b"CDF\1" + bytes(4) + b"\0\0\0\x0a" + b"\xff" * 4, "its header is damaged"),
        (b"CDF\5" + bytes(8) + b"\0\0\0\x0a" + b"\xff" * 16, "its header is damaged"),
        (b"CDF\1" + bytes(20) + b"\0\0\0\x0b\0\0\0\1" + bytes(4) + b"\xff" * 4, "of 4,294,967"),
    ],
)
def test_invalid_netcdf3_headers_are_rejected(tmp_path, data, said):
    (tmp_path / "x.nc").write_bytes(data)
    if said:
        with pytest.raises(ValueError, match=said):
            netcdf.length_note(tmp_path / "x.nc")
    else:
        assert netcdf.length_note(tmp_path / "x.nc") == ""


def test_invalid_parquet_metadata_is_ignored(tmp_path):
    for told in (b"[1]", b'{"info": {"features": {"y": {"names": [1]}}}}', b"{", b"[" * 100000):
        table = pyarrow.table({"x": [1.0, 2.0], "y": [0, 1]})
        table = table.replace_schema_metadata({b"huggingface": told})
        pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
        pack(f"{tmp_path / 'x.parquet'}:x", tmp_path / "out", "y", fresh=True)
        assert Shards(tmp_path / "out").meta.classes == []


def test_library_error_is_reported_with_file_name(tmp_path, monkeypatch):
    monkeypatch.setattr(zarrs, "source", lambda *_: {}["\x1b"])
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / "zarr.json").write_text("{}")
    with pytest.raises(InvalidFileError, match=r"x\.zarr: can't be read") as error:
        open_source(tmp_path / "x.zarr", "", None)
    assert str(error.value).isprintable()
