"""Sources of ``paceline pack`` that somebody else has made: no hang, no traceback, no memory."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

import sets
from paceline.data import Shards, pack
from paceline.data.formats import classic, source, zarrs
from paceline.data.formats.tfrecord import HEAD, TAIL, _example, _masked
from paceline.data.unfinished import WORK
from paceline.security.files import InvalidFileError


@pytest.fixture(autouse=True)
def _no_hang():
    """A file that is waited for without end ends the test, and not the run."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def npy(array) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def npy_head(shape: str, descr: str = "'<f8'") -> bytes:
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    head = head.ljust(118 + 64 * (len(head) // 64)) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode()


def strange(folder: Path, name: str, kind: str) -> str:
    """Make a file of a kind, and say how it is called."""
    path = folder / name
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            os.chdir(folder)
            made.bind(name)
        return "no regular file"
    else:
        path.symlink_to("/dev/zero")
    return f"{kind} and no regular file"


@pytest.mark.parametrize("kind", ["a FIFO", "a character device", "a socket"])
def test_a_sample_that_is_no_regular_file_is_an_error_of_its_own(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    folder = sets.images(tmp_path / "in", 9)
    said = strange(folder / "bee", "odd.jpg", kind)
    (folder / "bee" / "link.jpg").symlink_to(folder / "ant" / "0000.jpg")  # stays allowed
    with pytest.raises(ValueError, match=rf"bee/odd\.jpg \(sample \d+\): is {said}"):
        pack(folder, tmp_path / "out")
    report = pack(folder, tmp_path / "out", on_error="skip")
    assert report.meta.samples == 10
    assert len(report.left_out) == 1


def test_a_table_of_labels_and_its_samples(tmp_path):
    folder = sets.images(tmp_path / "in", 6)
    os.mkfifo(folder / "odd.jpg")
    (tmp_path / "labels.csv").write_text("ant/0000.jpg,1\nodd.jpg,2\n")
    report = pack(folder, tmp_path / "out", tmp_path / "labels.csv", on_error="skip")
    assert "odd.jpg" in report.left_out[0]
    os.mkfifo(tmp_path / "fifo.csv")
    with pytest.raises(ValueError, match=r"fifo\.csv: no table that can be read: is a FIFO"):
        pack(folder, tmp_path / "two", tmp_path / "fifo.csv")
    (tmp_path / "long.csv").write_text("a" * (2 << 20))
    with pytest.raises(ValueError, match=r"long\.csv: no table that can be read: a line has"):
        pack(folder, tmp_path / "three", tmp_path / "long.csv")
    (tmp_path / "large.csv").write_text(f"ant/0000.jpg,{10**30}\n")
    with pytest.raises(ValueError, match="does not fit into 64 bits"):
        pack(folder, tmp_path / "four", tmp_path / "large.csv")


def test_files_names_are_printed_without_control_characters(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "\x1b]0;owned\x07.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match="Could not determine") as error:
        pack(folder, tmp_path / "out")
    assert str(error.value).isprintable()


def test_links_that_lead_to_each_other_have_an_end(tmp_path):
    for one in range(6):
        (tmp_path / "in" / f"{one}").mkdir(parents=True)
        (tmp_path / "in" / f"{one}" / "x.bin").write_bytes(b"x")
        for other in range(6):
            if one != other:
                (tmp_path / "in" / f"{one}" / f"to{other}").symlink_to(f"../{other}")
    with pytest.raises(ValueError, match="more than 64 links lead to this folder"):
        pack(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (npy_head("(1099511627776, 2)"), "is truncated"),
        (npy_head("(-1, 2)"), "its shape is"),
        (npy_head("(2, 3)", "'|O'"), "not of numbers"),
        (npy_head("(2, 3)", "'|V100'"), "not of numbers"),
        (npy_head("((" * 3000 + "))" * 3000), "is no .npy file that can be read"),
        (npy_head("(1,) * 40"), "is no .npy file that can be read"),
        (npy_head("(1099511627776, 0)"), "says that it has 1,099,511,627,776 samples"),
        (npy_head("()") + bytes(8), "no C-ordered array of samples"),
        (b"", "is no .npy file that can be read"),
    ],
)
def test_heads_of_npy_files_take_no_memory(tmp_path, data, said):
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(ValueError, match=said):
        pack(tmp_path / "x.npy", tmp_path / "out")
    if "()" in str(data):  # a number alone can be a file's sample
        return
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.npy").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.npy|has 4 GiB|none of 1 samples"):
        pack(tmp_path / "in", tmp_path / "two")


def test_npy_files_that_are_fifos(tmp_path):
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(ValueError, match=r"x\.npy: is a FIFO and no regular file"):
        pack(tmp_path / "x.npy", tmp_path / "out")
    with pytest.raises(ValueError, match=r"x\.npy: is a FIFO and no regular file"):
        pack(np.zeros((3, 2)), tmp_path / "out", tmp_path / "x.npy")


@pytest.mark.parametrize("name", ["a.tar", "a.tfrecord", "a.parquet", "data.mdb", ".zarray"])
def test_folders_of_other_formats_with_a_fifo(tmp_path, name):
    folder = tmp_path / "in"
    folder.mkdir()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match="is a FIFO and no regular file"):
        pack(folder, tmp_path / "out")


def record(content: bytes, length: int | None = None) -> bytes:
    head = (len(content) if length is None else length).to_bytes(8, "little")
    return head + TAIL.pack(_masked(head)) + content + TAIL.pack(_masked(content))


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
        (b"\xff" * 40, "is no tf.train.Example"),
    ],
)
def test_features_of_tfrecords(tmp_path, content, said):
    (tmp_path / "x.tfrecord").write_bytes(record(content))
    with pytest.raises(ValueError, match=said):
        pack(tmp_path / "x.tfrecord", tmp_path / "out")


def test_lengths_of_tfrecords(tmp_path):
    """A sparse file of 1 TiB, of one record."""
    path = tmp_path / "x.tfrecord"
    path.write_bytes(record(b"", 1 << 40)[: HEAD.size])
    os.truncate(path, (1 << 40) + 100)
    with pytest.raises(ValueError, match="a record of 1,099,511,627,776 bytes"):
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
        (2000 * (tar_head("a", b"00000000000\0", b"x")), "can't be read as a tar|holds no samples"),
    ],
)
def test_headers_of_tars(tmp_path, head, said):
    (tmp_path / "x.tar").write_bytes(head + bytes(10240))
    with pytest.raises(ValueError, match=said):
        pack(tmp_path / "x.tar", tmp_path / "out")


def test_a_sparse_member_of_a_tar(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        one = tarfile.TarInfo("a.npy")
        one.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        one.pax_headers |= {"GNU.sparse.name": "a.npy", "GNU.sparse.realsize": str(1 << 40)}
        content = b"1\n0\n512\n".ljust(512, b"\0") + bytes(512)
        one.size = len(content)
        tar.addfile(one, io.BytesIO(content))
    with pytest.raises(ValueError, match="is a sparse file"):
        pack(tmp_path / "x.tar", tmp_path / "out")


def test_a_class_list_beside_a_file_is_a_regular_one(tmp_path):
    (tmp_path / "x.tfrecord").write_bytes(record(example(x=b"a", label=[1])))
    os.mkfifo(tmp_path / "classes.txt")
    with pytest.raises(ValueError, match=r"classes\.txt: is a FIFO"):
        pack(tmp_path / "x.tfrecord", tmp_path / "out")


def test_rows_and_chunks_of_hdf5_that_are_too_large(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("row", (2, 1 << 40), "f4", chunks=(1, 1 << 20))
        file.create_dataset("chunk", (1 << 20, 1 << 20), "f4", chunks=(1 << 20, 1))
        file.create_dataset("many", (1 << 40,), "u1", chunks=(1 << 10,))
        file["pairs"] = np.zeros(2, "f4,f4")
    for name in ("row", "chunk"):
        with pytest.raises(ValueError, match="bytes at once"):
            pack(f"{tmp_path / 'x.h5'}:{name}", tmp_path / "out")
    with pytest.raises(ValueError, match="is no array of numbers"):
        pack(f"{tmp_path / 'x.h5'}:pairs", tmp_path / "out")


def test_hdf5_whose_values_are_in_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "raw")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (4, 2), "f4", external=[("raw", 0, 32)])
        layout = h5py.VirtualLayout((4, 2), "f4")
        layout[:] = h5py.VirtualSource("raw", "x", (4, 2))
        file.create_virtual_dataset("v", layout)
    for name in ("x", "v"):
        with pytest.raises(ValueError, match="its values are in raw, which can't be read"):
            pack(f"{tmp_path / 'x.h5'}:{name}", tmp_path / "out")


def test_zarr_with_a_chunk_that_is_a_fifo_or_a_codec_that_runs_code(tmp_path):
    made = zarr.create_array(str(tmp_path / "x.zarr"), shape=(4, 2), chunks=(2, 2), dtype="f4")
    made[:] = 1
    chunk = next(p for p in (tmp_path / "x.zarr").rglob("0") if p.is_file())
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(ValueError, match="is a FIFO and no regular file"):
        pack(tmp_path / "x.zarr", tmp_path / "out")
    pickle = types.SimpleNamespace(codec_id="pickle")
    for hostile in ({"filters": [pickle]}, {"compressor": pickle}):
        with pytest.raises(ValueError, match="its codec pickle runs code from the file"):
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
def test_headers_of_netcdf_3(tmp_path, data, said):
    (tmp_path / "x.nc").write_bytes(data)
    if said:
        with pytest.raises(ValueError, match=said):
            classic.lacks(tmp_path / "x.nc")
    else:
        assert classic.lacks(tmp_path / "x.nc") == ""


def test_what_a_library_raises_is_told_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(zarrs, "source", lambda *_: {}["\x1b"])
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / "zarr.json").write_text("{}")
    with pytest.raises(InvalidFileError, match=r"x\.zarr: can't be read") as error:
        source(tmp_path / "x.zarr", "", None)
    assert str(error.value).isprintable()


# the state of a pack that was stopped


@pytest.fixture
def stopped(tmp_path):
    """(source, folder) of a pack of which two shards are whole."""
    x = np.arange(64.0).reshape(16, 4)
    np.save(tmp_path / "x.npy", x)

    def step(done: int, size: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "x.npy", tmp_path / "out", shard_bytes=128, workers=1, step=step)
    assert (tmp_path / "out" / WORK / "shard-00001.json").exists()
    return tmp_path / "x.npy", tmp_path / "out"


def whole(folder: Path) -> bool:
    found = sorted(array.tobytes() for array in Shards(folder))
    return found == sorted(row.tobytes() for row in np.arange(64.0).reshape(16, 4))


@pytest.mark.parametrize(
    "damage",
    [
        {"shard": 3},
        {"next": -1},
        {"next": 1 << 80},
        {"left_out": [1]},
        {"alike": [["float64", [-1]]]},
        {"statistics": {"mean": [1.0], "classes": []}},
        {"statistics": {"samples": 1, "count": 1.0, "mean": [1.0], "squares": [], "classes": []}},
        {"shard": {"file": "../x", "samples": 4, "bytes": 128, "crc": 0}},
        {"shard": {"file": "shard-00000.bin", "samples": 5, "bytes": 128, "crc": 0}},
        b"[" * 100000,
        b"\xff",
    ],
    ids=str,
)
def test_damaged_state_of_a_shard_is_discarded(stopped, damage):
    source, folder = stopped
    path = folder / WORK / "shard-00001.json"
    if isinstance(damage, dict):
        damage = json.dumps(json.loads(path.read_bytes()) | damage).encode()
    path.write_bytes(damage)
    assert pack(source, folder, shard_bytes=128).went_on_at == 4
    assert whole(folder)


@pytest.mark.parametrize("cut", [{"first": 8, "each": 0}, {"samples": 1 << 60}, [], b"\0"], ids=str)
def test_a_damaged_cut_is_discarded(stopped, cut):
    source, folder = stopped
    told = {"first": 8, "each": 1, "samples": 16, "channels": None}
    data = cut if isinstance(cut, bytes) else json.dumps(told | cut if cut else cut).encode()
    (folder / WORK / "pieces.json").write_bytes(data)
    (folder / WORK / "piece-000000").mkdir()
    assert pack(source, folder, shard_bytes=128).meta.samples == 16
    assert whole(folder)


@pytest.mark.parametrize("plan", [b"[1]", b"", b"{", b"[" * 100000])
def test_a_damaged_plan_is_refused_in_a_line(stopped, plan):
    source, folder = stopped
    (folder / WORK / "plan.json").write_bytes(plan)
    with pytest.raises(ValueError, match=r"plan\.json: .* HINT: fresh=True") as error:
        pack(source, folder, shard_bytes=128)
    assert "\n" not in str(error.value)
    pack(source, folder, shard_bytes=128, fresh=True)
    assert whole(folder)


@pytest.mark.parametrize("name", ["lock", "plan.json", "shard-00000.json", "rows-00000"])
def test_state_that_is_a_fifo_is_not_waited_for(stopped, name):
    source, folder = stopped
    (folder / WORK / name).unlink()
    os.mkfifo(folder / WORK / name)
    if name in ("lock", "plan.json"):
        with pytest.raises(ValueError, match="is a FIFO and no regular file"):
            pack(source, folder, shard_bytes=128)
    else:
        pack(source, folder, shard_bytes=128)
        assert whole(folder)


def test_links_in_the_working_folder_lead_nowhere(stopped, tmp_path):
    """What they name is neither removed nor written over."""
    source, folder = stopped
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").write_text("kept")
    for name in ("shard-00002.part", ".shard-00002.json.part", "rows.part", ".plan.json.part"):
        (folder / WORK / name).unlink(missing_ok=True)
        (folder / WORK / name).symlink_to(other / "kept")
    (folder / ".paceline.json.part").symlink_to(other / "kept")
    (folder / WORK / "run-x").symlink_to(other)
    (folder / WORK / "piece-000009").symlink_to(other)
    pack(source, folder, shard_bytes=128)
    assert whole(folder)
    pack(source, folder, shard_bytes=128, fresh=True)
    assert (other / "kept").read_text() == "kept"
    assert [p.name for p in other.iterdir()] == ["kept"]


def test_a_working_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_text("kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / WORK).symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="is a symbolic link"):
        pack(np.zeros((4, 2)), tmp_path / "out", fresh=True)
    assert (tmp_path / "other" / "kept").exists()


def test_a_name_with_a_line_break_is_one_line(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for key in ("a\nb", "c"):
            one = tarfile.TarInfo(f"{key}.npy")
            one.size = len(npy(np.zeros(3)))
            tar.addfile(one, io.BytesIO(npy(np.zeros(3))))
    pack(tmp_path / "x.tar", tmp_path / "out")
    shards = Shards(tmp_path / "out")
    assert {shards.name(0), shards.name(1)} == {r"a\x0ab", "c"}


def test_the_command_tells_a_fifo_in_a_line(tmp_path):
    folder = sets.images(tmp_path / "in", 3)
    os.mkfifo(folder / "ant" / "odd.jpg")
    words = [sys.executable, "-m", "paceline", "pack", str(folder), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "ant/odd.jpg (sample 1): is a FIFO and no regular file" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
@pytest.mark.parametrize("size", ["48k", "200k", "520k"])
def test_a_full_disk_is_told_once_and_leaves_what_goes_on(tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(400, 256)))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        words = ["pack", tmp_path / "x.npy", disk / "out", "--shard-size", "100k"]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *map(str, words)], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr.count("No space left on device") == 1
        assert done.stderr.count("\n") == 1
        left = [str(p.relative_to(disk)) for p in disk.rglob("*") if p.is_file()]
        assert not [name for name in left if ".part" in name], left
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("name", ["x.tfrecord", "x.tar", "x.npy", "in"])
def test_a_source_that_is_refused_leaves_no_file_open(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.npy").write_bytes(b"")
    (tmp_path / "in" / "b.jpg").write_bytes(b"")
    for one in ("x.tfrecord", "x.tar", "x.npy"):
        (tmp_path / one).write_bytes(b"\0" * 1024)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ValueError, match=name):
            pack(tmp_path / name, tmp_path / "out")
    assert len(os.listdir("/proc/self/fd")) == before
