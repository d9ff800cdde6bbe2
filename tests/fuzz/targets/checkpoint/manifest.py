"""A checkpoint's manifest with a valid checksum, and the skeleton of a state from a shard.

The first byte selects one: the JSON of a manifest, or the plain values of a skeleton.
"""

import ast
import json
import warnings
import zlib
from collections.abc import Iterator

import torch

from fuzz.scratch import new_folder
from paceline.checkpoint import state_tree
from paceline.checkpoint.manifest import MANIFEST, checksum
from paceline.checkpoint.shard_content import verify_checkpoint

FOLDER = new_folder() / "step-00000003"
FOLDER.mkdir()
warnings.simplefilter("ignore", SyntaxWarning)
SHARD = b"a shard"
(FOLDER / "rank-00000.pt").write_bytes(SHARD)
(FOLDER.parent / "outside.pt").write_bytes(SHARD)
state_tree.MAX_PARTS = 10_000
TENSORS = [
    torch.arange(4),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(2).to_sparse(),
    torch.ones(2),
]


def seeds() -> Iterator[bytes]:
    entry = {"name": "rank-00000.pt", "bytes": len(SHARD), "crc32": zlib.crc32(SHARD)}
    body = {"format": "paceline-checkpoint", "version": 1, "step": 3, "epoch": 1, "inside": False}
    yield b"m" + json.dumps({**body, "ranks": 1, "files": [entry]}).encode()
    yield b"m" + json.dumps({**body, "files": [{**entry, "name": "../outside.pt"}]}).encode()
    state = {"w": {"__paceline_tensor__": 0}, "more": [1, (2.5, None), {3, 4}, b"x"]}
    arrays = {"a": {"__paceline_array__": ("float32", {"__paceline_tensor__": 3})}}
    yield b"s" + repr({**state, **arrays, "d": {"__paceline_deque__": [1]}}).encode()


def run(data: bytes) -> None:
    kind, rest = data[:1], data[1:]
    if kind == b"s":
        try:
            skeleton = ast.literal_eval(rest.decode())
        except (SyntaxError, TypeError, MemoryError, RecursionError):
            return
        state_tree.unflatten(skeleton, TENSORS)
        return
    body = json.loads(rest)
    if isinstance(body, dict):
        body.pop("check", None)
        body["check"] = checksum(body)
    (FOLDER / MANIFEST).write_text(json.dumps(body))
    manifest = verify_checkpoint(FOLDER)
    assert [entry["name"] for entry in manifest["files"]] == ["rank-00000.pt"]
