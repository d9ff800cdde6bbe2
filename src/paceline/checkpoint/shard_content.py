"""What a shard contains, and joining the shards of a checkpoint to its state."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import state_tree
from .manifest import (
    DamagedCheckpointError,
    Manifest,
    ShardEntry,
    read_manifest,
    read_shard,
    verify_shard,
)
from .sharded_tensor import Piece, PieceError, SavedTensor, is_piece
from .shared_state import merge_owned

MAX_VERIFYING_THREADS = 8


def load_shards(folder: Path, manifest: Manifest) -> tuple[Any, list[Any]]:
    """Return the shared tree, and the own tree of each rank.

    Raises:
        DamagedCheckpointError: The content of a shard is invalid.
    """
    skeleton, own = None, []
    tensors: dict[int, torch.Tensor | SavedTensor] = {}
    pieces: dict[int, list[Piece]] = {}
    for rank, entry in enumerate(manifest["files"]):
        path = folder / entry["name"]
        shard = _checked(read_shard(folder, entry["name"]), path)
        _check_bytes(shard, entry["bytes"], path)
        _check_identity(shard.get("save"), manifest, rank, path)
        skeleton = shard["shared"] if shard["shared"] is not None else skeleton
        tensors.update(shard["tensors"])
        for number, piece in shard.get("pieces", {}).items():
            pieces.setdefault(number, []).append(piece)
        own.append(_joined(shard["own"], [tensor.clone() for tensor in shard["own_tensors"]], path))
    try:
        tensors.update({number: SavedTensor.of(each) for number, each in pieces.items()})
    except PieceError as error:
        raise DamagedCheckpointError(folder, str(error)) from None
    if tensors.keys() != set(range(len(tensors))):
        raise DamagedCheckpointError(folder, "lacks tensors that its shards should have")
    shared = _joined(skeleton, [tensors[i] for i in range(len(tensors))], folder)
    try:
        merge_owned(shared, own)
    except (PieceError, AttributeError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(folder, f"has invalid parts of ranks: {error}") from None
    return shared, own


def verify_checkpoint(folder: Path, rank: int = 0, size: int = 1) -> Manifest:
    """Verify the shards of a checkpoint by reading every byte. Return its manifest.

    Args:
        folder: Folder of the checkpoint.
        rank: Number of the caller among those that verify it together.
        size: Their number; each verifies as many shards.

    Raises:
        DamagedCheckpointError: A file is missing, corrupted, or of another checkpoint; the error
            names the file.
    """
    manifest = read_manifest(folder)
    entries = dict(list(enumerate(manifest["files"]))[rank::size])
    # reading and the checksum release the interpreter's lock
    with ThreadPoolExecutor(max(1, min(MAX_VERIFYING_THREADS, len(entries)))) as pool:
        problems = list(pool.map(partial(_problem, folder), entries.values()))
    for number, problem in zip(entries, problems, strict=True):
        if problem is not None:
            reason = _other_save(folder, manifest, number)
            raise DamagedCheckpointError(problem.file, reason or problem.reason)
    return manifest


def _problem(folder: Path, entry: ShardEntry) -> DamagedCheckpointError | None:
    try:
        verify_shard(folder, entry)
    except DamagedCheckpointError as error:
        return error
    return None


def _other_save(folder: Path, manifest: Manifest, rank: int) -> str:
    """Return of which other save an intact shard is; "" for a damaged one."""
    path = folder / manifest["files"][rank]["name"]
    try:
        save = _checked(read_shard(folder, path.name), path).get("save")
    except DamagedCheckpointError:
        return ""
    return describe_other_save(save, manifest, rank) if save is not None else ""


def _checked(shard: Any, path: Path) -> dict[str, Any]:
    """Return the content of a shard after checking that it has the parts that ``save`` writes.

    Raises:
        DamagedCheckpointError: A part is missing or has the wrong type.
    """
    parts = shard if isinstance(shard, dict) else {}
    tensors, own = parts.get("tensors"), parts.get("own_tensors")
    pieces = parts.get("pieces", {})
    complete = isinstance(tensors, dict) and isinstance(own, list) and isinstance(pieces, dict)
    if complete and {"shared", "own"} <= set(parts):
        each = [*(tensors or {}).values(), *(own or ())]
        if (
            all(type(i) is int for i in (*(tensors or ()), *pieces))
            and all(isinstance(tensor, torch.Tensor) for tensor in each)
            and all(is_piece(piece) for piece in pieces.values())
        ):
            return parts
    raise DamagedCheckpointError(path, "is not a shard of a checkpoint")


def _check_bytes(shard: dict[str, Any], limit: int, path: Path) -> None:
    """Check that the tensors of a shard have no more bytes than its file: each is stored once.

    Raises:
        DamagedCheckpointError: Several tensors are in the same place of the file, so that copies of
            them would take any amount of memory.
    """
    pieces = (piece["tensor"] for piece in shard.get("pieces", {}).values())
    total = 0
    for tensor in (*shard["tensors"].values(), *shard["own_tensors"], *pieces):
        if tensor.is_nested or tensor.layout is not torch.strided:
            total += sum(part.nbytes for part in state_tree.dense_parts(tensor))
        else:
            total += tensor.numel() * tensor.element_size()
    if total > limit:
        raise DamagedCheckpointError(path, "has several tensors in one place")


def _check_identity(save: Any, manifest: Manifest, rank: int, path: Path) -> None:
    """Check that a shard was written in the save of the manifest, by the rank of its name.

    Raises:
        DamagedCheckpointError: The shard is of another save, run or rank.
    """
    reason = describe_other_save(save, manifest, rank)
    if reason:
        raise DamagedCheckpointError(path, reason)


def describe_other_save(save: Any, manifest: Manifest, rank: int) -> str:
    """Return to which other save, run or rank a shard belongs; "" if it belongs here."""
    entry = manifest["files"][rank]
    if "id" not in entry:  # version 1: before shards had an identity
        return ""
    expected = {"id": entry["id"], "step": manifest.get("step"), "rank": rank}
    if save == expected:
        return ""
    if not isinstance(save, dict) or save.keys() != expected.keys():
        return "does not say to which checkpoint it belongs"
    if save["id"] in [entry.get("id") for entry in manifest["files"]]:
        return f"is the shard of rank {save['rank']!r:.20}, under the name of rank {rank}"
    return f"is a part of another checkpoint or run (step {save['step']!r:.20})"


def _joined(skeleton: Any, tensors: list[Any], path: Path) -> Any:
    try:
        return state_tree.unflatten(skeleton, tensors)
    except state_tree.SkeletonError as error:
        raise DamagedCheckpointError(path, str(error)) from None
