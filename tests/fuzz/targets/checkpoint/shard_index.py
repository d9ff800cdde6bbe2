"""The content of shards of format 2: numbers, shapes and offsets of pieces, and their identity.

The input is a list with a dict for each rank. In place of a tensor stands ``("t", shape)``: zeros
of this shape, each stored once, or ``("again", shape)``: of the storage that others have too.
"""

import ast
import json
import warnings
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from crc32c import crc32c

from fuzz.scratch import new_folder
from paceline.checkpoint.manifest import MANIFEST, checksum
from paceline.checkpoint.saver import load_checkpoint
from paceline.checkpoint.sharded_tensor import SavedTensor, whole

warnings.simplefilter("ignore")
FOLDER = new_folder() / "step-00000003"
FOLDER.mkdir()
MAX_ELEMENTS = 1000
IDS = ("0" * 16, "1" * 16)


def seeds() -> Iterator[bytes]:
    def shard(rank: int, **more: Any) -> dict[str, Any]:
        save = {"id": IDS[rank], "step": 3, "rank": rank}
        plain = {"shared": None, "count": 2, "tensors": {}, "own": {}, "own_tensors": []}
        return {**plain, "save": save, **more}

    def piece(row: int) -> dict[str, Any]:
        return {"shape": (4, 3), "offset": (row, 0), "tensor": ("t", (2, 3))}

    marks = [{"__paceline_tensor__": 0}, {"__paceline_tensor__": 1}]
    first = shard(0, shared={"models": [{"w": marks[0], "b": marks[1]}]}, pieces={0: piece(0)})
    yield repr([{**first, "tensors": {1: ("t", (3,))}}, shard(1, pieces={0: piece(2)})]).encode()
    own = {"own": {"m": {"__paceline_tensor__": 0}}, "own_tensors": [("again", (8,))]}
    yield repr([shard(0, shared={}), shard(1, **own)]).encode()


def run(data: bytes) -> None:
    try:
        shards = ast.literal_eval(data.decode())
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        return
    if not isinstance(shards, list) or not 1 <= len(shards) <= len(IDS):
        return
    shared_storage = torch.zeros(MAX_ELEMENTS)
    entries = []
    for rank, shard in enumerate(shards):
        path = FOLDER / f"rank-{rank:05}.pt"
        torch.save(_with_tensors(shard, shared_storage), path)
        content = path.read_bytes()
        entry = {"name": path.name, "bytes": len(content), "crc32c": crc32c(content)}
        entries.append({**entry, "id": IDS[rank]})
    body = {"format": "paceline-checkpoint", "version": 2, "step": 3, "files": entries}
    (FOLDER / MANIFEST).write_text(json.dumps({**body, "check": checksum(body)}))
    shared, own, _ = load_checkpoint(FOLDER)
    copied = sum(_whole_bytes(tree) for tree in (shared, own))
    assert copied <= sum(entry["bytes"] for entry in entries)


def _with_tensors(value: Any, again: torch.Tensor, depth: int = 0) -> Any:
    if depth > 50:
        return None
    if isinstance(value, tuple) and len(value) == 2 and value[0] in ("t", "again"):
        shape = value[1]
        sizes = shape if isinstance(shape, tuple) else ()
        if all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in sizes):
            count = prod(sizes)
            if count <= MAX_ELEMENTS:
                made = again[:count] if value[0] == "again" else torch.zeros(count)
                return made.view(sizes)
        return None
    if isinstance(value, dict):
        return {key: _with_tensors(item, again, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(item, again, depth + 1) for item in value)
    return value


def _whole_bytes(tree: Any) -> int:
    """Return the bytes of copies of all tensors, as a restoring process makes them."""
    if isinstance(tree, torch.Tensor | SavedTensor):
        return whole(tree).nbytes
    if isinstance(tree, dict):
        return sum(map(_whole_bytes, tree.values()))
    return sum(map(_whole_bytes, tree)) if isinstance(tree, list | tuple) else 0
