"""Asynchronous checkpoints: training waits only for the copy, and a thread writes it to disk.

Ranks coordinate through the job's store. Each rank reports to the store that its shard is on disk.
Rank 0 then writes the manifest and renames the checkpoint to its final name.
"""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from ..plurals import named_ranks
from ..security.error_reason import error_reason
from ..security.files import UnsafeFileError
from . import checkpoint_folder, state_tree
from .manifest import DamagedCheckpointError, Manifest
from .shared_state import SharedState
from .unfinished_folder import UnfinishedFolder, remove

KEPT_CHECKPOINTS = 2  # the newest and the previous one
OWN_STATE = "this rank's state"  # in messages


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that the saver uses."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class CheckpointSaver:
    """Writer of the checkpoints of one job, one at a time, in a background thread.

    Args:
        directory: Directory of the checkpoints.
        rank: Global rank.
        size: World size.
        store: Store of the job; None with one rank.
        warn: Function that prints a warning.
        timeout: Seconds that rank 0 waits for the shards of the other ranks.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        size: int,
        store: Store | None,
        warn: Callable[[str], None],
        timeout: float = 600.0,
    ) -> None:
        self.directory = directory
        self.rank, self.size, self.store = rank, size, store
        self.warn = warn
        self.timeout = timeout
        self._thread: threading.Thread | None = None
        self._saves = 0
        self._flushes = True  # whether the file system is known to flush folders

    @property
    def busy(self) -> bool:
        """Whether the last checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, shared: SharedState, own: Any, about: dict[str, Any]) -> None:
        """Copy the state and start a thread that writes the copy. All ranks must call it.

        Args:
            step: Training step.
            shared: State that all ranks restore. Each rank writes a part of its tensors, so they
                must be equal on all ranks, except those of rank 0.
            own: Tree of this rank.
            about: Fields for the manifest.

        Raises:
            ValueError: A value can't be saved; the message names its position.
        """
        self.wait()
        owner = shared.assign(self.size)
        own_skeleton, own_tensors = state_tree.flatten(own, OWN_STATE)
        state = {
            "shared": shared.skeleton if self.rank == 0 else None,
            "count": len(owner),
            "tensors": {
                i: state_tree.copy_to_cpu(shared.tensors[i])
                for i, rank in enumerate(owner)
                if rank == self.rank
            },
            "own": own_skeleton,
            "own_tensors": [state_tree.copy_to_cpu(tensor) for tensor in own_tensors],
        }
        self._saves += 1
        self._thread = threading.Thread(
            target=self._write, args=(step, state, about, self._saves), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save has completed, or failed with a warning."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: Any, about: dict[str, Any], save: int) -> None:
        name = f"step-{step:08}"
        path = self.directory / f".{name}.{save}.tmp"  # the same step may be saved twice
        folder: UnfinishedFolder | None = None
        entry: dict[str, Any]
        trusted = True  # whether the folder with this name may be removed
        try:
            folder = UnfinishedFolder(path)
            entry = checkpoint_folder.write_shard(folder, self.rank, state)
        except Exception as error:
            trusted = not isinstance(error, UnsafeFileError)
            entry = {"error": error_reason(error)}
        try:
            entries = self._gather(save, entry)
            if entries is None:
                return
            problems = _problems(entries)
            if problems or folder is None:
                raise OSError(problems)
            manifest = {**about, "step": step, "files": entries}
            flushed = checkpoint_folder.commit(folder, self.directory / name, manifest)
            if not flushed and self._flushes:
                self._flushes = False
                self.warn(
                    f"the file system of {self.directory} can't flush folders (fsync): a "
                    "checkpoint that was just written can be lost if its server loses power"
                )
            checkpoint_folder.remove_old(self.directory, KEPT_CHECKPOINTS)
        except Exception as error:
            if folder is not None and folder.has_final_name:
                self.warn(
                    f"the checkpoint of step {step} was written, but flushing its name or removing "
                    f"older checkpoints failed ({error_reason(error)}); the training "
                    "continues, and older checkpoints remain"
                )
                return
            if trusted and not isinstance(error, UnsafeFileError):
                remove(path)
            self.warn(
                f"the checkpoint of step {step} could not be written ({error_reason(error)}); "
                "the training continues, and the previous checkpoint remains"
            )
        finally:
            if folder is not None:
                folder.close()

    def _gather(self, save: int, entry: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the manifest entries of all ranks on rank 0, and None on the other ranks."""
        if self.store is None:
            return [entry]
        keys = [f"paceline/checkpoint/{save}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(entry))
        if self.rank:
            return None
        deadline = time.monotonic() + self.timeout
        # Polled, because a blocking wait would hold the store's lock against the training thread.
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise OSError(
                    f"{named_ranks(late)} did not write the shard within {self.timeout:.0f} s"
                )
            time.sleep(0.005)
        return [json.loads(self.store.get(key)) for key in keys]


def _problems(entries: list[dict[str, Any]]) -> str:
    """Return the failure reasons with their ranks; "" if all ranks have written their shards."""
    ranks: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        if "error" in entry:
            ranks.setdefault(entry["error"], []).append(rank)
    return "; ".join(f"{named_ranks(of)}: {reason}" for reason, of in ranks.items())


def find_newest_valid(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the newest valid checkpoint, None if there are no checkpoints.

    Print a warning for each corrupted checkpoint that is skipped, with the name of the file.

    Raises:
        ValueError: All existing checkpoints are corrupted. Starting from the beginning would
            overwrite data that the user might still recover.
    """
    candidates = checkpoint_folder.list_checkpoints(directory)
    for folder in candidates:
        try:
            checkpoint_folder.verify_checkpoint(folder)
            return folder
        except checkpoint_folder.DamagedCheckpointError as problem:
            warn(f"checkpoint {folder.name} is skipped: {problem}")
    if candidates:
        raise ValueError(
            f"{directory} contains no valid checkpoint ({len(candidates)} damaged). HINT: to start "
            f"from the beginning, mv {directory} {directory}.damaged"
        )
    return None


def load_checkpoint(folder: Path) -> tuple[Any, list[Any], Manifest]:
    """Return ``(shared, own, manifest)`` of a verified checkpoint; ``own`` has one tree per rank.

    Raises:
        DamagedCheckpointError: The content of a shard is invalid.
    """
    manifest = checkpoint_folder.read_manifest(folder)
    skeleton, tensors, own = None, {}, []
    for entry in manifest["files"]:
        path = folder / entry["name"]
        shard = _checked(checkpoint_folder.read_shard(folder, entry["name"]), path)
        skeleton = shard["shared"] if shard["shared"] is not None else skeleton
        tensors.update(shard["tensors"])
        own.append(_joined(shard["own"], shard["own_tensors"], path))
    if tensors.keys() != set(range(len(tensors))):
        raise DamagedCheckpointError(folder, "lacks tensors that its shards should have")
    ordered: list[torch.Tensor] = [tensors[i] for i in range(len(tensors))]
    return _joined(skeleton, ordered, folder), own, manifest


def _checked(shard: Any, path: Path) -> dict[str, Any]:
    """Return the content of a shard after checking that it has the parts that ``save`` writes.

    Raises:
        DamagedCheckpointError: A part is missing or has the wrong type.
    """
    parts = shard if isinstance(shard, dict) else {}
    tensors, own = parts.get("tensors"), parts.get("own_tensors")
    whole = isinstance(tensors, dict) and isinstance(own, list) and {"shared", "own"} <= set(parts)
    if whole and all(type(i) is int for i in tensors or ()):
        each = [*(tensors or {}).values(), *(own or ())]
        if all(isinstance(tensor, torch.Tensor) for tensor in each):
            return parts
    raise DamagedCheckpointError(path, "is not a shard of a checkpoint")


def _joined(skeleton: Any, tensors: list[torch.Tensor], path: Path) -> Any:
    try:
        return state_tree.unflatten(skeleton, tensors)
    except state_tree.SkeletonError as error:
        raise DamagedCheckpointError(path, str(error)) from None
