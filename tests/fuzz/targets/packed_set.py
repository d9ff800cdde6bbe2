"""paceline.json, names.txt and index.bin of a packed dataset with valid checksums.

All samples are then read. Input: the number of the file, then its content (of paceline.json without
its checksum).
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from crc32c import crc32c

from fuzz.scratch import new_folder
from paceline.data import pack, shards
from paceline.data.format import meta_schema
from paceline.data.format.shard_format import INDEX_FILE, META_FILE, NAMES_FILE, ROW_STRUCT
from paceline.data.shards import ScratchBuffer, Shards

MAX_BYTES = 1 << 20
meta_schema.MAX_SAMPLE_BYTES = shards.MAX_SAMPLE_BYTES = MAX_BYTES
FOLDER = new_folder()


def _files(folder: Path) -> None:
    for k in range(6):
        path = folder / "in" / f"class{k % 2}" / f"{k}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.full((2, 3), k, "float32"))
    pack(folder / "in", folder / "set", shard_bytes=60)


_files(FOLDER)
SET = FOLDER / "set"
WHOLE = {name: (SET / name).read_bytes() for name in (META_FILE, INDEX_FILE, NAMES_FILE)}
SHARDS = [path.read_bytes() for path in sorted(SET.glob("shard-*.bin"))]
ORDER = (META_FILE, INDEX_FILE, NAMES_FILE)


def seeds() -> Iterator[bytes]:
    for number, name in enumerate(ORDER):
        yield bytes([number]) + WHOLE[name]
    tree = json.loads(WHOLE[META_FILE])
    tree.pop("files")
    yield b"\0" + json.dumps(tree).encode()
    yield b"\0" + json.dumps(tree | {"array": None, "label": None, "statistics": {}}).encode()


def run(data: bytes) -> None:
    if not data:
        return
    for name, whole in WHOLE.items():
        (SET / name).write_bytes(whole)
    name, content = ORDER[data[0] % len(ORDER)], data[1:]
    if name == META_FILE:
        content = _sealed(content)
    elif name == INDEX_FILE:
        content = _rows(content)
    (SET / name).write_bytes(content)
    if name != META_FILE:
        tree = json.loads(WHOLE[META_FILE])
        tree["files"][name] = {"bytes": len(content), "crc": crc32c(content)}
        (SET / META_FILE).write_bytes(_sealed(json.dumps(tree).encode()))
    shards, found = Shards(SET), 0
    try:
        shards.check_files()
        for i in range(min(len(shards), 10)):
            said = ""
            try:
                shards.read(i, ScratchBuffer())
                found += len(shards.name(i))
            except ValueError as error:
                said = str(error)
            assert said.isprintable(), said
    finally:
        del shards


def _sealed(content: bytes) -> bytes:
    """Return the content with its checksum, if it is JSON that can have one."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(tree, dict):
        return content
    text = json.dumps(tree | {"checksum": "........"}).encode()
    return text.replace(b"........", f"{crc32c(text):08x}".encode(), 1)


def _rows(content: bytes) -> bytes:
    """Return rows with valid checksums, as many as there were."""
    size = len(WHOLE[INDEX_FILE])
    content = content[:size].ljust(size, b"\0")
    made = b""
    for at in range(0, size, ROW_STRUCT.size):
        covered = content[at : at + ROW_STRUCT.size - 4]
        offset, length, shard = struct.unpack_from("<QII", covered, 8)
        data = SHARDS[shard][offset : offset + length] if shard < len(SHARDS) else b""
        made += covered + crc32c(covered, crc32c(data)).to_bytes(4, "little")
    return made
