"""Sources of ``paceline pack`` from an attacker: no hang, no traceback, bounded memory."""

import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import sets

from paceline.data import Shards, pack


@pytest.fixture(autouse=True)
def _no_hang():
    """Let an endless wait for a file end the test instead of the test run."""
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
    """Create a file of the given kind and return what errors call it."""
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
def test_sample_that_is_not_a_regular_file_raises_or_is_skipped(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    folder = sets.images(tmp_path / "in", 9)
    said = strange(folder / "bee", "odd.jpg", kind)
    (folder / "bee" / "link.jpg").symlink_to(folder / "ant" / "0000.jpg")  # allowed
    with pytest.raises(ValueError, match=rf"bee/odd\.jpg \(sample \d+\): is {said}"):
        pack(folder, tmp_path / "out", follow_links=True)
    report = pack(folder, tmp_path / "out", on_error="skip", follow_links=True)
    assert report.meta.samples == 10
    assert len(report.left_out) == 1


def test_invalid_label_tables_and_samples_are_rejected(tmp_path):
    folder = sets.images(tmp_path / "in", 6)
    os.mkfifo(folder / "odd.jpg")
    (tmp_path / "labels.csv").write_text("ant/0000.jpg,1\nodd.jpg,2\n")
    report = pack(folder, tmp_path / "out", tmp_path / "labels.csv", on_error="skip")
    assert "odd.jpg" in report.left_out[0]
    os.mkfifo(tmp_path / "fifo.csv")
    with pytest.raises(ValueError, match=r"fifo\.csv can't be read as a CSV: is a FIFO"):
        pack(folder, tmp_path / "two", tmp_path / "fifo.csv")
    (tmp_path / "long.csv").write_text("a" * (2 << 20))
    with pytest.raises(ValueError, match=r"long\.csv can't be read as a CSV: a line has"):
        pack(folder, tmp_path / "three", tmp_path / "long.csv")
    (tmp_path / "large.csv").write_text(f"ant/0000.jpg,{10**30}\n")
    with pytest.raises(ValueError, match="does not fit into 64 bits"):
        pack(folder, tmp_path / "four", tmp_path / "large.csv")


def test_file_names_are_printed_without_control_characters(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "\x1b]0;owned\x07.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match="Could not determine") as error:
        pack(folder, tmp_path / "out")
    assert str(error.value).isprintable()


def test_mutual_symlinks_are_rejected(tmp_path):
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
        (npy_head("(2, 3)", "'|O'"), "is not numeric"),
        (npy_head("(2, 3)", "'|V100'"), "is not numeric"),
        (npy_head("((" * 3000 + "))" * 3000), "can't be read as a .npy file"),
        (npy_head("(1,) * 40"), "can't be read as a .npy file"),
        (npy_head("(1099511627776, 0)"), "1,099,511,627,776 samples of 0 bytes would be packed"),
        (npy_head("()") + bytes(8), "not a C-ordered array of samples"),
        (b"", "can't be read as a .npy file"),
    ],
)
def test_invalid_npy_headers_allocate_no_memory(tmp_path, data, said):
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(ValueError, match=said):
        pack(tmp_path / "x.npy", tmp_path / "out")
    if "()" in str(data):  # a scalar in a .npy file is a valid sample of a folder
        return
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.npy").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.npy|has 4 GiB|none of 1 samples"):
        pack(tmp_path / "in", tmp_path / "two")


def test_npy_fifo_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(ValueError, match=r"x\.npy: is a FIFO and no regular file"):
        pack(tmp_path / "x.npy", tmp_path / "out")
    with pytest.raises(ValueError, match=r"x\.npy: is a FIFO and no regular file"):
        pack(np.zeros((3, 2)), tmp_path / "out", tmp_path / "x.npy")


def test_line_break_in_sample_name_is_escaped(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for key in ("a\nb", "c"):
            one = tarfile.TarInfo(f"{key}.npy")
            one.size = len(npy(np.zeros(3)))
            tar.addfile(one, io.BytesIO(npy(np.zeros(3))))
    pack(tmp_path / "x.tar", tmp_path / "out")
    shards = Shards(tmp_path / "out")
    assert {shards.name(0), shards.name(1)} == {r"a\x0ab", "c"}


def test_pack_command_reports_fifo_in_one_line(tmp_path):
    folder = sets.images(tmp_path / "in", 3)
    os.mkfifo(folder / "ant" / "odd.jpg")
    words = [sys.executable, "-m", "paceline", "pack", str(folder), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "ant/odd.jpg (sample 1): is a FIFO and no regular file" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["x.tfrecord", "x.tar", "x.npy", "in"])
def test_rejected_source_leaves_no_file_open(tmp_path, name):
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
