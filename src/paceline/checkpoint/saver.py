"""Asynchronous checkpoints: training waits only for the copy, and a thread writes it to disk.

Ranks coordinate through the job's store. Each rank reports to the store that its shard is on disk.
Rank 0 then writes the manifest and renames the checkpoint to its final name.
"""

import contextlib
import json
import mmap
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..plurals import named_ranks
from ..security.files import UnsafeFileError, error_reason
from ..security.run_lock import RunLock
from . import checkpoint_folder, state_tree
from .checkpoint_folder import PAGE_BYTES, map_memory
from .manifest import Manifest
from .shard_content import load_shards, verify_checkpoint
from .sharded_tensor import Piece, describe, is_sharded, piece_of
from .shared_state import SharedState
from .unfinished_folder import UnfinishedFolder, remove_checkpoint

KEPT_CHECKPOINTS = 2  # the newest and the previous one
WRITER_NICENESS = 10  # of the writing thread; on Linux each thread has a priority of its own
OWN_STATE = "this rank's state"  # in messages


# Copies of tensors for a save, in memory that the next save uses again.

MIN_STAGED_BYTES = 64 << 10  # smaller tensors are copied one by one


class StagingMemory:
    """Memory for the tensors of one save.

    A tensor begins on a page, so that it can be written without another copy. The memory remains
    until a save needs more of it, or less than half.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies in CPU memory, each with a storage of its own.

        They are valid until the next call.
        """
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end if _is_staged(tensor) else -1)
            end += -(-tensor.nbytes // PAGE_BYTES) * PAGE_BYTES if _is_staged(tensor) else 0
        memory = self._reserve(end)
        return [
            _copy(tensor) if at < 0 else _copy_into(memory, at, tensor)
            for tensor, at in zip(tensors, offsets, strict=True)
        ]

    def _reserve(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or not len(self._memory) // 2 <= nbytes <= len(self._memory):
            self._memory = None  # first, so that both do not exist at the same time
            self._memory = map_memory(max(nbytes, PAGE_BYTES))
        return self._memory


def _is_staged(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() and tensor.nbytes >= MIN_STAGED_BYTES


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _copy_into(memory: mmap.mmap, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    octets = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
    return octets.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


class Ranks(NamedTuple):
    """The ranks that look for a checkpoint together.

    Attributes:
        rank: This rank.
        size: Their number.
        gather: Collective that returns the values of all ranks, by rank; its second argument is
            their type.
    """

    rank: int
    size: int
    gather: Callable[[Any, Any], list[Any]]


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

    Attributes:
        failure: On rank 0, why the last checkpoint could not be written; "" if it was.
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
        self._staging = StagingMemory()
        self._flushes = True  # whether the file system is known to flush folders
        self.failure = ""
        run = os.environ.get("PACELINE_RUN", "")
        self._lock = RunLock(directory, "checkpoint", run) if rank == 0 else None

    def lock(self, say: Callable[[str], None]) -> None:
        """Keep other runs from using the directory until ``close``.

        Args:
            say: Function that prints why this call waits.

        Raises:
            ValueError: Another run uses the directory, or the lock can't be written.
        """
        if self._lock is None:
            return
        try:
            self._lock.acquire(say)
        except OSError as error:
            raise ValueError(
                f"checkpoints can't be written to {self.directory}: {error_reason(error)}. "
                "HINT: set checkpoint=... of world.epochs to another folder"
            ) from None
        self._lock.keep(self.warn)

    def describe_remaining(self) -> str:
        """Return which complete checkpoint the directory has."""
        found = checkpoint_folder.list_checkpoints(self.directory)
        return f"{found[0]} remains" if found else f"there is no checkpoint in {self.directory}"

    def close(self) -> None:
        """Let other runs use the directory."""
        if self._lock is not None:
            self._lock.release()

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
        sharded = {i: tensor for i, tensor in enumerate(shared.tensors) if is_sharded(tensor)}
        pieces = {i: piece_of(tensor, copies=shared.copies) for i, tensor in sharded.items()}
        state = {
            "shared": shared.skeleton if self.rank == 0 else None,
            "count": len(owner),
            "own": own_skeleton,
            **self._copied(shared.tensors, owner, pieces, own_tensors),
        }
        layout = zlib.crc32(repr([(i, describe(t)) for i, t in sharded.items()]).encode())
        self._saves += 1
        self._thread = threading.Thread(
            target=self._write, args=(step, state, about, self._saves, layout), daemon=True
        )
        self._thread.start()

    def _copied(
        self,
        tensors: list[torch.Tensor],
        owner: list[int],
        pieces: dict[int, Piece | None],
        own_tensors: list[torch.Tensor],
    ) -> dict[str, Any]:
        """Return copies of what this rank writes: ``tensors``, ``pieces`` and ``own_tensors``."""
        whole = [i for i, rank in enumerate(owner) if rank == self.rank and i not in pieces]
        held = {i: piece for i, piece in pieces.items() if piece is not None}
        sources = [tensors[i] for i in whole]
        sources += [piece["tensor"] for piece in held.values()] + own_tensors
        copies = iter(self._staging.copy(sources))
        return {
            "tensors": {i: next(copies) for i in whole},
            "pieces": {i: {**piece, "tensor": next(copies)} for i, piece in held.items()},
            "own_tensors": list(copies),
        }

    def wait(self) -> None:
        """Wait until the last save has completed, or failed with a warning."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: Any, about: dict[str, Any], save: int, layout: int) -> None:
        name = f"step-{step:08}"
        path = self.directory / f".{name}.{save}.tmp"  # the same step may be saved twice
        folder: UnfinishedFolder | None = None
        entry: dict[str, Any]
        trusted = True  # whether the folder with this name may be removed
        _lower_priority()
        try:
            folder = UnfinishedFolder(path)
            identity = secrets.token_hex(8)  # tells this shard from those of other saves
            state["save"] = {"id": identity, "step": step, "rank": self.rank}
            entry = checkpoint_folder.write_shard(folder, self.rank, state)
            entry |= {"id": identity, "layout": layout}
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
            self.failure = ""
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
                remove_checkpoint(path)
            self.failure = (
                f"the checkpoint of step {step} could not be written ({error_reason(error)})"
            )
            self.warn(f"{self.failure}; the training continues, and {self.describe_remaining()}")
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


def _lower_priority() -> None:
    """Let the training go first where this thread and the ranks share cores."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)


def _problems(entries: list[dict[str, Any]]) -> str:
    """Return the failure reasons with their ranks; "" if all ranks have written their shards."""
    ranks: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        if "error" in entry:
            ranks.setdefault(entry["error"], []).append(rank)
    layouts = [entry.pop("layout", None) for entry in entries]
    if not ranks and (
        other := [rank for rank, layout in enumerate(layouts) if layout != layouts[0]]
    ):
        return f"{named_ranks(other)}: the DTensors have other shapes or placements than on rank 0"
    return "; ".join(f"{named_ranks(of)}: {reason}" for reason, of in ranks.items())


def find_newest_valid(
    directory: Path, warn: Callable[[str], None], ranks: Ranks | None = None
) -> Path | None:
    """Return the newest valid checkpoint, None if there are no checkpoints.

    Print a warning for each corrupted checkpoint that is skipped, with the name of the file.

    Args:
        directory: Directory of the checkpoints.
        warn: Function that prints a warning; rank 0 calls it.
        ranks: The ranks that call this together, each of which reads a part of the shards. They
            take the checkpoints that rank 0 finds. None: this process reads all shards.

    Raises:
        ValueError: All existing checkpoints are corrupted. Starting from the beginning would
            overwrite data that the user might still recover.
    """
    rank, size, gather = ranks or Ranks(0, 1, lambda own, _: [own])
    found = checkpoint_folder.list_checkpoints(directory) if rank == 0 else []
    names = gather([folder.name for folder in found], list[str])[0]
    candidates: list[Path] = [directory / name for name in names]
    for folder in candidates:
        problems: list[tuple[str, str] | None] = gather(
            _problem_of(folder, rank, size), tuple[str, str] | None
        )
        first = min((problem for problem in problems if problem is not None), default=None)
        if first is None:
            return folder
        if rank == 0:
            warn(f"checkpoint {folder.name} is skipped: {first[1]}")
    if candidates:
        raise ValueError(
            f"{directory} contains no valid checkpoint ({len(candidates)} damaged). HINT: to start "
            f"from the beginning, mv {directory} {directory}.damaged"
        )
    return None


def _problem_of(folder: Path, rank: int, size: int) -> tuple[str, str] | None:
    """Return the name of the first damaged file of those that this rank reads, and a message."""
    try:
        verify_checkpoint(folder, rank, size)
    except checkpoint_folder.DamagedCheckpointError as problem:
        return problem.file.name, str(problem)
    return None


def load_checkpoint(folder: Path) -> tuple[Any, list[Any], Manifest]:
    """Return ``(shared, own, manifest)`` of a verified checkpoint; ``own`` has one tree per rank.

    Files are mapped into memory, and read where a tensor is used. Tensors that were saved in pieces
    are of type ``SavedTensor``.

    Raises:
        DamagedCheckpointError: The content of a shard is invalid.
    """
    manifest = checkpoint_folder.read_manifest(folder)
    shared, own = load_shards(folder, manifest)
    return shared, own, manifest
