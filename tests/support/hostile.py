"""Packed sets as somebody with bad intentions makes them: every checksum is right."""

import json
from pathlib import Path

from crc32c import crc32c

from paceline.data.format.shard_format import INDEX_FILE, META_FILE, ROW_STRUCT, checksum, pack_row


def sealed(tree: dict) -> bytes:
    """paceline.json of a tree, with the right checksum."""
    text = json.dumps(tree | {"checksum": "........"}).encode()
    return text.replace(b"........", f"{crc32c(text):08x}".encode(), 1)


def resealed(folder: Path, **changes: object) -> None:
    """Change values of paceline.json."""
    tree = json.loads((folder / META_FILE).read_bytes())
    (folder / META_FILE).write_bytes(sealed(tree | changes))


def sample_replaced(folder: Path, i: int, data: bytes, shape, dtype="uint8", encoding=0, **meta):
    """Give sample ``i`` other bytes, at the end of the first shard, and the row that is said."""
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
