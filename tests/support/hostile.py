"""Malicious packed datasets: all their checksums are valid."""

import json
from pathlib import Path

from crc32c import crc32c

from paceline.data.format.shard_format import INDEX_FILE, META_FILE, ROW_STRUCT, checksum, pack_row


def sealed(tree: dict) -> bytes:
    """Return the contents of paceline.json for these values, with a valid checksum."""
    text = json.dumps(tree | {"checksum": "........"}).encode()
    return text.replace(b"........", f"{crc32c(text):08x}".encode(), 1)


def resealed(folder: Path, **changes: object) -> None:
    """Change values in paceline.json and update its checksum."""
    tree = json.loads((folder / META_FILE).read_bytes())
    (folder / META_FILE).write_bytes(sealed(tree | changes))


def sample_replaced(folder: Path, i: int, data: bytes, shape, dtype="uint8", encoding=0, **meta):
    """Append new bytes for sample ``i`` to the first shard, and give it a row with these values."""
    tree = json.loads((folder / META_FILE).read_bytes())
    shard = folder / tree["shards"][0]["file"]
    whole = shard.read_bytes()
    shard.write_bytes(whole + data)
    tree["shards"][0]["bytes"] += len(data)
    tree["shards"][0]["crc"] = crc32c(data, crc32c(whole))
    row = pack_row(0, len(whole), len(data), 0, tuple(shape), dtype, encoding)
    row += checksum(row, data).to_bytes(4, "little")
    index = bytearray((folder / INDEX_FILE).read_bytes())
    index[i * ROW_STRUCT.size : (i + 1) * ROW_STRUCT.size] = row
    (folder / INDEX_FILE).write_bytes(index)
    tree.pop("files", None)
    (folder / META_FILE).write_bytes(sealed(tree | meta))
