"""Packed datasets from an attacker, with valid checksums: a one-line error, no side effects."""

import json
import os
import shutil
import subprocess
import sys

import hostile
import numpy as np
import pytest
import sets
import zstandard

from paceline.data import DataError, Loader, Shards, pack
from paceline.data.format.shard_format import (
    IMAGE,
    INDEX_FILE,
    JPEG,
    META_FILE,
    NAMES_FILE,
    ZSTD,
    load_meta,
    read_meta_checksum,
)
from paceline.data.shards import verify
from paceline.security.files import InvalidFileError


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Pack 30 images of (20, 24) in three classes into several shards; do not change them."""
    folder = tmp_path_factory.mktemp("set")
    pack(sets.images(folder / "in", 30), folder / "out", shard_bytes=5000)
    return folder / "out"


@pytest.fixture
def copy(tmp_path, images):
    return shutil.copytree(images, tmp_path / "copy")


@pytest.fixture
def arrays(tmp_path):
    x, y = sets.arrays(12)
    pack(x, tmp_path / "arrays", y)
    return tmp_path / "arrays"


def limited(code: str, *words: object, megabytes: int = 1024) -> subprocess.CompletedProcess[str]:
    """Run Python code with a memory limit above its imports and a time limit of 60 seconds."""
    head = (
        "import resource, sys, paceline.data.shards\nfrom paceline.data import Shards, Loader\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (size + ({megabytes} << 20),) * 2)\n"
    )
    command = [sys.executable, "-c", head + code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


SHARD = {"file": "shard-00000.bin", "samples": 30, "bytes": 1, "crc": 0}
WRONG = [
    {"samples": 300.0},
    {"samples": -1},
    {"samples": 1 << 70},
    {"samples": 29},
    {"packed": ["images"]},
    {"packed": {"kind": 3}},
    {"array": {"dtype": "uint8", "shape": [1 << 44]}},
    {"array": {"dtype": "uint8", "shape": [-1, -1]}},
    {"array": {"dtype": "uint8", "shape": [1 << 62, 0, 1 << 62, 1 << 62]}, "label": 3},
    {"array": {"dtype": "object", "shape": [2]}},
    {"array": {"dtype": "float32", "shape": [1] * 33}},
    {"label": {"dtype": "float64", "shape": [1 << 40]}},
    {"label": "classes"},
    {"classes": [1, 2]},
    {"names": "yes"},
    {"statistics": {"mean": "a"}},
    {"statistics": {"mean": [1.0]}},
    {"statistics": {"of": 1, "mean": [1.0], "deviation": [1.0, 2.0]}},
    {"statistics": {"classes": {"0": -1}}},
    {"files": {"paceline.json": {"bytes": 1, "crc": 1}}},
    {"files": {"index.bin": {"bytes": 1, "crc": 1 << 40}}},
    *({"shards": [SHARD | {"file": file}]} for file in ("", ".", "..", "../x", "x.bin", "a\0b")),
    *({"shards": [SHARD | {"file": f"shard-0000{end}"}]} for end in ("0.bin\n", "\x1b.bin", "²")),
    {"shards": [SHARD | {"samples": 15}, SHARD | {"samples": 15}]},
    {"shards": [SHARD | {"crc": -1}]},
    {"shards": {}},
]


@pytest.mark.parametrize("change", WRONG, ids=lambda one: json.dumps(one)[:40])
def test_metadata_with_valid_checksum_and_wrong_values_is_rejected(copy, change):
    hostile.resealed(copy, **change)
    with pytest.raises(
        DataError, match=r"paceline\.json: (does not match its format|contradicts itself)"
    ) as e:
        load_meta(copy)
    assert isinstance(e.value, InvalidFileError)
    assert str(e.value).isprintable()


def test_metadata_strings_are_printable(copy):
    hostile.resealed(copy, classes=["\x1b]0;owned\x07", "bee", "cat"])
    assert load_meta(copy).classes[0] == r"\x1b]0;owned\x07"


def test_malformed_checksum_is_rejected(copy):
    tree = json.loads((copy / META_FILE).read_bytes())
    (copy / META_FILE).write_text(json.dumps(tree | {"checksum": "../../../../home"}))
    for read in (load_meta, read_meta_checksum):
        with pytest.raises(DataError, match="its checksum is not valid"):
            read(copy)


def test_dataset_without_file_checksums_is_readable(copy):
    tree = json.loads((copy / META_FILE).read_bytes())
    del tree["files"]
    (copy / META_FILE).write_bytes(hostile.sealed(tree))
    assert len({Shards(copy).name(i) for i in range(30)}) == 30
    assert verify(copy, 1) == []


@pytest.mark.parametrize("name", [META_FILE, INDEX_FILE, NAMES_FILE, "shard-00000.bin"])
def test_dataset_file_that_is_a_fifo_is_rejected(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(DataError, match=r"is a FIFO|is no regular file"):
        Shards(copy).name(0)


@pytest.mark.parametrize("kind", ["told", "untold"])
def test_zstd_output_is_limited_to_size_in_index(tmp_path, kind):
    """512 MiB of zeros compress to 16 KiB of zstd."""
    pack(np.zeros((4, 8), "uint8"), tmp_path / "set", compress=True)
    maker = zstandard.ZstdCompressor(write_content_size=kind == "told").compressobj(
        **({"size": 512 << 20} if kind == "told" else {})
    )
    bomb = b"".join(maker.compress(bytes(1 << 20)) for _ in range(512)) + maker.flush()
    hostile.sample_replaced(tmp_path / "set", 1, bomb, (8,), encoding=ZSTD)
    code = (
        "print(*paceline.data.shards.verify(sys.argv[1], 1), sep='\\n')\n"
        "try:\n    Shards(sys.argv[1])[1]\nexcept ValueError as error:\n    print(error)\n"
    )
    done = limited(code, tmp_path / "set", megabytes=200)
    said = (
        "decompresses to 536,870,912 bytes, but its row says 8"
        if kind == "told"
        else "did not decompress full frame"
    )
    assert done.stdout.count(said) == 2, done
    assert "sample 1 at byte" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("shape", "dtype", "encoding", "said"),
    [
        ((20, 24, 2), "uint8", JPEG, "its row says an image of"),
        ((20, 24), "uint8", IMAGE, "its row says an image of"),
        ((0, 24, 3), "uint8", JPEG, "its row says an image of"),
        ((65535, 65535, 3), "float64", ZSTD, "larger than 4 GiB"),
        ((1 << 31, 1 << 31, 1 << 31, 8), "uint8", IMAGE, "larger than 4 GiB"),
        ((7,), "float32", 0, "its row is damaged: it has 7 bytes of 28"),
        ((21, 24, 3), "uint8", JPEG, "Could not determine|can't be"),
    ],
)
def test_index_rows_with_wrong_values_are_rejected(copy, shape, dtype, encoding, said):
    hostile.sample_replaced(copy, 3, b"\xff\xd8\xff not", shape, dtype, encoding, array=None)
    with pytest.raises(DataError, match=said):
        Shards(copy)[3]
    assert len(verify(copy, 1)) == 1


def test_index_row_that_differs_from_metadata_is_rejected(arrays):
    hostile.sample_replaced(arrays, 2, bytes(16), (4,), "float32")
    with pytest.raises(DataError, match=r"its row says float32 of \(4,\), but paceline.json"):
        Shards(arrays)[2]


def test_sample_shorter_than_its_label_is_rejected(tmp_path):
    pack(np.zeros((4, 8), "uint8"), tmp_path / "set", np.zeros((4, 3)), compress=True)
    hostile.sample_replaced(tmp_path / "set", 0, b"x", (8,), "uint8", ZSTD)
    with pytest.raises(DataError, match="its label alone has 24 bytes"):
        Shards(tmp_path / "set")[0]


def test_image_size_is_checked_before_decoding(copy):
    """A PNG of 9,000 x 9,000 pixels replaces one of 20 x 24."""
    from PIL import Image

    Image.new("L", (9000, 9000)).save(copy.parent / "large.png")
    data = (copy.parent / "large.png").read_bytes()
    hostile.sample_replaced(copy, 3, data, (20, 24, 3), "uint8", IMAGE)
    done = limited("print(*paceline.data.shards.verify(sys.argv[1], 1))", copy, megabytes=200)
    assert "is an image of (9000, 9000), but its row says (20, 24, 3)" in done.stdout, done


def test_eps_image_is_rejected(copy):
    """Pillow passes EPS to Ghostscript."""
    head = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 20\n%%EndComments\n"
    hostile.sample_replaced(copy, 3, head, (20, 24, 3), "uint8", IMAGE)
    with pytest.raises(DataError, match="can't be opened as an image"):
        Shards(copy)[3]


def test_jpeg_with_too_many_scans_is_rejected(copy):
    """Each scan of a progressive JPEG covers all pixels, so a few bytes cost a second of work."""
    import io

    from PIL import Image

    made = io.BytesIO()
    Image.new("L", (4000, 4000)).save(made, "JPEG", progressive=True)
    data = made.getvalue()
    at = data.rindex(b"\xff\xda")
    bomb = data[:at] + 400 * data[at:-2] + data[-2:]
    hostile.sample_replaced(copy, 3, bomb, (4000, 4000, 1), "uint8", JPEG, array=None)
    with pytest.raises(DataError, match=r"is a JPEG of \d+ scans"):
        Shards(copy)[3]


def test_changed_names_file_is_detected(copy):
    data = bytearray((copy / NAMES_FILE).read_bytes())
    data[5] ^= 1
    (copy / NAMES_FILE).write_bytes(data)
    (said,) = verify(copy, 1)
    assert "names.txt: a byte has changed" in str(said)
    with pytest.raises(DataError, match=r"names\.txt: a byte has changed"):
        Shards(copy).name(0)
    with pytest.raises(ValueError, match=r"names\.txt: a byte has changed"):
        pack(copy, copy.parent / "again")


def test_check_detects_swapped_index_rows(copy):
    rows = (copy / INDEX_FILE).read_bytes()
    (copy / INDEX_FILE).write_bytes(rows[48:96] + rows[:48] + rows[96:])
    (said,) = verify(copy, 1)
    assert "index.bin: has changed" in str(said)


def test_names_file_of_old_dataset_needs_one_line_per_sample(copy):
    tree = json.loads((copy / META_FILE).read_bytes())
    del tree["files"]
    (copy / META_FILE).write_bytes(hostile.sealed(tree))
    whole = (copy / NAMES_FILE).read_bytes()
    for data in (whole + b"more\n", whole[:-1], whole.replace(b"\n", b"", 1), b"\0" * (1 << 20)):
        (copy / NAMES_FILE).write_bytes(data)
        with pytest.raises(DataError, match=r"names\.txt: does not have one line for each of 30"):
            Shards(copy).name(0)


def test_control_characters_of_names_are_escaped_in_errors(copy):
    tree = json.loads((copy / META_FILE).read_bytes())
    del tree["files"]
    (copy / META_FILE).write_bytes(hostile.sealed(tree))
    (copy / NAMES_FILE).write_bytes(b"\x1b[2J\x07\n" * 30)
    row = Shards(copy).row(0)
    with (copy / load_meta(copy).shards[row.shard].file).open("r+b") as file:
        file.seek(row.offset)
        file.write(b"\0")
    with pytest.raises(DataError, match="a byte has changed") as error:
        Shards(copy)[0]
    assert str(error.value).isprintable()
    assert r"\x1b[2J\x07" in str(error.value)


@pytest.mark.parametrize("skips", [False, True])
def test_loader_rejects_or_skips_hostile_sample(arrays, skips):
    hostile.sample_replaced(arrays, 2, b"x" * 48, (12,), "float32")
    loader = Loader(str(arrays), batch_size=4, num_workers=2, on_error="skip" if skips else "stop")
    if not skips:
        with pytest.raises(DataError, match="sample 2 at byte"):
            list(loader)
        return
    with pytest.warns(UserWarning, match="left out a sample"):
        assert sum(len(y) for _, y in loader) == 11


def test_excessive_class_count_allocates_no_memory(tmp_path):
    pack(np.zeros((4, 2)), tmp_path / "set", np.array([0, 1, 1 << 60, 2]))
    with pytest.raises(DataError, match="at most 16,777,216 classes"):
        Shards(tmp_path / "set").classes  # noqa: B018


def test_pack_command_reports_hostile_dataset_in_one_line(copy):
    hostile.resealed(copy, samples=300.0)
    for words in (["--check", copy], [copy, copy.parent / "out"]):
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "pack", *map(str, words)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert done.stderr.startswith(f"paceline: {copy / META_FILE}: does not match its format")
        assert done.stderr.count("\n") == 1


def test_batch_larger_than_memory_is_reported(tmp_path):
    pack(np.zeros((2, 1 << 25), np.float32), tmp_path / "set", compress=True, statistics=0)
    code = "try:\n    next(iter(Loader(sys.argv[1], 2)))\nexcept ValueError as e:\n    print(e)"
    done = limited(code, tmp_path / "set", megabytes=150)
    said = "a batch of 2 samples, float32 of (33554432,), needs 0.2 GiB"
    assert said in done.stdout, done.stderr
