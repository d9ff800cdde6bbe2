"""The state of an interrupted pack: files of DEST/.packing.

Input: the number of the file, then its content. A later call must continue or fail with a one-line
error, and must give the same dataset.
"""

import json
import os
import shutil
from collections.abc import Iterator

import numpy as np

from fuzz.scratch import new_folder
from paceline.data.packing.pieces import PARTITION_FILE, Partition, complete_pieces, piece_name
from paceline.data.packing.shard_writer import PIECE_STATE_FILE, ShardWriter
from paceline.data.packing.unfinished import KIND, PLAN_FILE, WORK_FOLDER, _prepare
from paceline.security.removal import write_mark

FOLDER = new_folder()
WORKING = FOLDER / WORK_FOLDER
PIECE = WORKING / piece_name(0)
FILES = (
    *(
        WORKING / one
        for one in ("shard-00000.json", PLAN_FILE, PARTITION_FILE, "rows-00000", "names-00000")
    ),
    *(PIECE / one for one in (PIECE_STATE_FILE, "rows-00000", "names-00000")),
)
SHARD = {"file": "shard-00000.bin", "samples": 2, "bytes": 16, "crc": 0}
MOMENTS = {"samples": 2, "count": 2.0, "mean": [1.0, 2.0], "squares": [0.5, 0.5]}
STATE = {"left_out": ["a"], "statistics": MOMENTS | {"classes": [[0, 2]]}}
STATE |= {"alike": [["float32", [2]]]}
CONTENTS = (
    json.dumps({"shard": SHARD, "next": 2, **STATE}).encode(),
    json.dumps({"source": "x", "seed": 0}).encode(),
    json.dumps({"first": 2, "each": 1, "samples": 4, "channels": [2]}).encode(),
    bytes(96),
    b"a\nb\n",
    json.dumps({"shards": [SHARD], **STATE}).encode(),
    bytes(96),
    b"c\nd\n",
)


def seeds() -> Iterator[bytes]:
    for number, content in enumerate(CONTENTS):
        yield bytes([number]) + content


def run(data: bytes) -> None:
    if not data:
        return
    PIECE.mkdir(parents=True, exist_ok=True)
    for path, content in zip(FILES, CONTENTS, strict=True):
        path.write_bytes(content)
    (FOLDER / "shard-00000.bin").write_bytes(bytes(16))
    (PIECE / "shard-00000.bin").write_bytes(bytes(16))
    FILES[data[0] % len(FILES)].write_bytes(data[1:])
    try:
        opened = os.open(WORKING, os.O_RDONLY)
        try:
            write_mark(opened, KIND)
            _prepare(FOLDER, WORKING, opened, False)
        finally:
            os.close(opened)
        writer = ShardWriter(FOLDER, WORKING, 100, False)
        try:
            cut = Partition.load(WORKING)
            same = cut is not None and (cut.first, cut.samples) == (writer.next_place, 4)
            if same and complete_pieces(cut, WORKING, FOLDER, len(writer.shards)):
                writer.adopt_piece(PIECE)
            assert writer.samples in (0, 2, 4), writer.samples
            json.dumps(writer.statistics.as_json())
            json.dumps(writer._state(0))
        finally:
            writer.abort()
    finally:
        for path in FOLDER.glob("shard-*"):
            path.unlink()
        shutil.rmtree(WORKING, ignore_errors=True)
    assert np.isfinite(writer.bytes)
