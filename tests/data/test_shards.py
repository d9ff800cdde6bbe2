"""A packed dataset: random access by threads and processes, errors that name damaged samples."""

import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys

import corrupt
import numpy as np
import pytest
import sets
from crc32c import crc32c
from torch.utils.data import DataLoader

from paceline.data import DataError, Shards, pack
from paceline.data.format.shard_format import ROW_STRUCT, load_meta


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    x, _ = sets.arrays(40)
    pack(x, folder / "out", np.arange(80.0).reshape(40, 2), shard_bytes=500)
    return folder / "out"


def test_index_row_is_48_bytes(images):
    assert ROW_STRUCT.size == 48
    assert (images / "index.bin").stat().st_size == 30 * 48


def test_shards_work_with_torch_dataloader(images):
    loader = DataLoader(Shards(images), batch_size=7, num_workers=2)
    seen = [label for _, labels in loader for label in labels.tolist()]
    assert seen == Shards(images).labels().tolist()


def test_shards_can_be_pickled(arrays):
    copy = pickle.loads(pickle.dumps(Shards(arrays)))
    assert np.array_equal(copy[3][0], Shards(arrays)[3][0])
    with pytest.raises(IndexError):
        copy[40]


@pytest.mark.parametrize("kind", ["images", "arrays"])
def test_random_damage_is_detected(request, tmp_path, kind):
    """``make soak`` runs this 10,000 times."""
    whole, draw = request.getfixturevalue(kind), random.Random(1)
    for _ in range(60):
        done = corrupt.damaged(whole, tmp_path / "copy", draw)
        found = corrupt.noticed(tmp_path / "copy")
        assert found, done
        assert str(tmp_path / "copy") in str(found[0])


def test_corrupted_byte_reports_file_sample_and_offset(tmp_path, images):
    whole = Shards(images)
    shutil.copytree(images, tmp_path / "copy")
    row = whole.row(11)
    path = tmp_path / "copy" / whole.meta.shards[row.shard].file
    data = bytearray(path.read_bytes())
    data[row.offset + row.length - 1] ^= 128
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        Shards(tmp_path / "copy")[11]
    assert (error.value.file, error.value.sample, error.value.offset) == (path, 11, row.offset)
    told = f"{path}: sample 11 at byte {row.offset:,}: a byte has changed (its checksum differs)"
    assert str(error.value) == f"{told} ({whole.name(11)})"
    assert Shards(tmp_path / "copy")[10][1] == whole[10][1]


def test_corrupted_label_is_detected(tmp_path, images):
    shutil.copytree(images, tmp_path / "copy")
    index = tmp_path / "copy" / "index.bin"
    data = bytearray(index.read_bytes())
    data[5 * ROW_STRUCT.size] ^= 1
    index.write_bytes(data)
    with pytest.raises(DataError, match=r"sample 5 at byte .* a byte has changed"):
        Shards(tmp_path / "copy")[5]


def test_shard_truncated_while_open_raises(tmp_path, arrays):
    shutil.copytree(arrays, tmp_path / "copy")
    shards = Shards(tmp_path / "copy")
    os.truncate(tmp_path / "copy" / "shard-00000.bin", 10)
    os.truncate(tmp_path / "copy" / "index.bin", 48)
    with pytest.raises(DataError, match=r"shard-00000.bin: sample 0 .* the shard is truncated"):
        shards[0]
    with pytest.raises(DataError, match=r"index.bin: sample 1 .* the index is truncated"):
        shards[1]


def test_unsupported_format_or_version_is_reported(tmp_path, arrays):
    copy = shutil.copytree(arrays, tmp_path / "copy")
    for told, message in (
        (
            {"format": "paceline-shards", "version": 2},
            "has format version 2, but this Paceline reads version 1",
        ),
        ({"format": "mds"}, "is not the metadata of a packed dataset"),
        ([1, 2], "is not the metadata of a packed dataset"),
    ):
        (copy / "paceline.json").write_text(json.dumps(told))
        with pytest.raises(DataError, match=re.escape(message)):
            load_meta(copy)


def test_damaged_index_row_allocates_no_memory(tmp_path, arrays):
    """Set a length of 4 GiB in a row of the index."""
    copy = shutil.copytree(arrays, tmp_path / "copy")
    data = bytearray((copy / "index.bin").read_bytes())
    data[16:20] = b"\xff\xff\xff\xff"
    (copy / "index.bin").write_bytes(data)
    code = (
        "import resource, sys\nfrom paceline.data import Shards\nshards = Shards(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "try:\n    shards[0]\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, copy], capture_output=True, text=True)
    assert "index.bin: sample 0 at byte 0: its row is damaged" in done.stdout


def test_invalid_metadata_with_valid_checksum_is_rejected(tmp_path, arrays):
    copy = shutil.copytree(arrays, tmp_path / "copy")
    whole = json.loads((copy / "paceline.json").read_text())
    for change in (
        {"shards": [{"file": "../x", "samples": 1, "bytes": 1, "crc": 0}]},
        {"shards": 3},
        {"array": {"dtype": "float32"}},
    ):
        text = json.dumps(whole | change | {"checksum": "........"}).encode()
        sealed = text.replace(b"........", f"{crc32c(text):08x}".encode(), 1)
        (copy / "paceline.json").write_bytes(sealed)
        with pytest.raises(DataError, match="does not match its format"):
            load_meta(copy)
