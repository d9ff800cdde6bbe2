"""Write a model file: a manifest as JSON and sections of data, with the SHA-256 of each.

``native/src/artifact.c`` reads it, and describes the layout.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..security.outputs import write_output

MAGIC = b"\x89PCLN\r\n\x1a"
FORMAT_VERSION = 1
ALIGNMENT = 64
HEADER = struct.Struct("<8sIIQ32s8x")


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_model_file(manifest: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """Return the content of a model file. Each section becomes an entry of manifest["sections"]."""
    entries: list[dict[str, Any]] = [
        {"name": name, "offset": 0, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sections.items()
    ]
    text = b""
    while True:  # offsets depend on the length of the manifest, which depends on them
        at = HEADER.size + len(text)
        for entry in entries:
            at = _padded(at)
            entry["offset"] = at
            at += entry["bytes"]
        new = json.dumps({**manifest, "sections": entries}, allow_nan=False, indent=1).encode()
        new = new.ljust(len(text))  # never shorter than the last one, so that this ends
        done = len(new) == len(text)
        text = new
        if done:
            break
    content = bytearray(
        HEADER.pack(MAGIC, FORMAT_VERSION, len(text), at, hashlib.sha256(text).digest())
    )
    content += text
    for data in sections.values():
        content += bytes(_padded(len(content)) - len(content)) + data
    return bytes(content)


def write_model_file(path: Path, manifest: Mapping[str, Any], sections: Mapping[str, bytes]) -> int:
    """Write a model file, completely or not at all. Return its bytes. Raises OSError."""
    content = encode_model_file(manifest, sections)
    write_output(path, content)
    return len(content)
