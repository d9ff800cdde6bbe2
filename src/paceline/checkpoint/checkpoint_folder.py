"""The folder of a checkpoint: shards, and a manifest with their checksums.

    DIR/step-00001200/rank-00000.pt ... manifest.json     complete
    DIR/.step-00001500.7.tmp/                             being written; never read

A checkpoint is written to a temporary folder, flushed to disk, and then renamed atomically. So a
folder with a final name is always complete. The previous checkpoint is kept.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from crc32c import crc32c
from torch.utils._pytree import tree_leaves

from ..cluster.topology.local_resources import file_system_type
from ..plurals import named_ranks
from ..security.files import open_regular
from ..security.folders import NewFile
from .manifest import (
    MANIFEST,
    VERSION,
    DamagedCheckpointError,
    ShardEntry,
    check_readable,
    checksum,
    read_manifest,
    read_shard,
)
from .unfinished_folder import (
    UnfinishedFolder,
    flush_folder,
    is_checkpoint,
    is_complete,
    remove_checkpoint,
    replaces,
)

__all__ = [
    "MANIFEST",
    "DamagedCheckpointError",
    "list_checkpoints",
    "read_manifest",
    "read_shard",
]
_TEMPORARY_NAME = re.compile(r"\.(step-\d+)\.(\d+|[0-9a-f]{16}\.old)\.tmp")
_CHECKPOINT_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,17})")  # names given by CheckpointSaver
BLOCK_BYTES = 4096  # a multiple of the sectors of all disks
WRITE_BYTES = 16 << 20  # of one call
PENDING_BYTES = 4 << 20
DIRECT_FILE_SYSTEMS = ("ext4", "xfs")  # of local disks; network file systems write behind


# Memory of large copies, and of mapped files.
#
# The kernel clears each page when it is first written. For pages of 4 KiB that takes longer than
# the copy itself; on a virtual machine several times as long.

PAGE_BYTES = mmap.PAGESIZE
MIN_POPULATED_BYTES = 1 << 20
_MADV_POPULATE_READ = 22  # of <sys/mman.h>


def map_memory(nbytes: int) -> mmap.mmap:
    """Return new memory that forked processes (of a DataLoader) do not share."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    return memory


def populate(mapped: torch.Tensor) -> None:
    """Map the pages of a large tensor in a mapped file at once, before it is read."""
    if not mapped.is_contiguous() or mapped.nbytes < MIN_POPULATED_BYTES:
        return
    start = -(-mapped.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    size = (mapped.data_ptr() + mapped.nbytes - start) // PAGE_BYTES * PAGE_BYTES
    # an older kernel has no such advice, and maps the pages one by one
    address, length = ctypes.c_void_p(start), ctypes.c_size_t(size)
    ctypes.CDLL(None).madvise(address, length, _MADV_POPULATE_READ)


# Sequential writing of a shard, without the page cache where that is faster.
#
# Writing through the page cache copies each byte, and takes memory and processor time that the
# training needs. Direct I/O does not, but needs whole blocks in the file and in memory.


class ShardFile:
    """A new file that is written from its beginning to its end, with its CRC-32C.

    Attributes:
        bytes: Number of bytes so far.
        crc: Their CRC-32C.
        error: The error of the last write; torch raises a RuntimeError instead of it.
    """

    def __init__(self, fd: int) -> None:
        """Write to the empty file ``fd``, which remains the caller's."""
        self._fd = fd
        self.bytes = self.crc = 0
        self.error: OSError | None = None
        is_local = file_system_type(Path(f"/proc/self/fd/{fd}")) in DIRECT_FILE_SYSTEMS
        self._is_direct = is_local and _set_direct(fd, True)
        self._pending = memoryview(map_memory(PENDING_BYTES))  # begins at a block of the file
        self._count = 0

    def write(self, data: bytes | memoryview) -> int:
        """Add bytes. Raises OSError."""
        left = memoryview(data)
        self.bytes += len(left)
        try:
            while left:
                left = left[self._add(left) :]
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def _add(self, data: memoryview) -> int:
        """Write or keep the first bytes of ``data``; return their number."""
        whole = min(len(data), WRITE_BYTES) // BLOCK_BYTES * BLOCK_BYTES
        if whole and not self._count % BLOCK_BYTES and not _address(data) % BLOCK_BYTES:
            self._write(self._pending[: self._count])
            self._count = 0
            self.crc = crc32c(data[:whole], self.crc)
            self._write(data[:whole])
            return whole
        size = min(len(data), PENDING_BYTES - self._count)
        kept = self._pending[self._count : self._count + size]
        kept[:] = data[:size]
        self.crc = crc32c(kept, self.crc)
        self._count += size
        if self._count == PENDING_BYTES:
            self._write(self._pending)
            self._count = 0
        return size

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError as error:
                # such as the rest of a block, or a file system without direct I/O
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._is_direct = not _set_direct(self._fd, False)
                if self._is_direct:
                    raise

    def flush(self) -> None:
        """Do nothing: ``finish`` writes the rest. torch.save calls it."""

    def finish(self) -> None:
        """Write the rest, and flush the file to disk. Raises OSError."""
        whole = self._count // BLOCK_BYTES * BLOCK_BYTES
        self._write(self._pending[:whole])
        if self._is_direct and _set_direct(self._fd, False):
            self._is_direct = False
        self._write(self._pending[whole : self._count])
        self._count = 0
        os.fsync(self._fd)


def _set_direct(fd: int, enabled: bool) -> bool:
    """Set whether writes bypass the page cache; return False if that is not possible."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if enabled else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


MIN_ALIGNED_BYTES = 100 * BLOCK_BYTES  # mean size of tensors whose padding adds below 1 %


def write_shard(folder: UnfinishedFolder, rank: int, state: Any) -> dict[str, Any]:
    """Write and flush the shard of one rank. Return its manifest entry (name, bytes, crc32c).

    Raises:
        UnsafeFileError: The folder belongs to another user.
        OSError: The shard can't be written.
        ValueError: The shard exceeds the limits of ``read_shard``.
    """
    name = f"rank-{rank:05}.pt"
    with folder.new_file(name) as new:
        file = ShardFile(new.fd)
        try:
            with _archive_options(state):
                torch.save(state, cast(Any, file))
        except RuntimeError:
            if file.error is not None:
                raise file.error from None
            raise
        file.finish()
    check_readable(folder.path / name, folder.fd)
    return {"name": name, "bytes": file.bytes, "crc32c": file.crc}


def _archive_options(state: Any) -> contextlib.AbstractContextManager[Any]:
    """Return how torch.save writes a shard; other threads of the process are not affected.

    The CRC-32C of the whole shard replaces the CRC-32 of each tensor, which torch would compute
    while it holds the interpreter's lock. Large tensors begin on a block of the file, so that
    ``ShardFile`` writes them from where they are.
    """
    try:
        from torch.utils.serialization import config
    except ImportError:  # PyTorch 2.6
        return contextlib.nullcontext()
    options: dict[str, Any] = {"save.compute_crc32": False}
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
    if hasattr(config.save, "storage_alignment") and nbytes > MIN_ALIGNED_BYTES * len(tensors):
        options["save.storage_alignment"] = BLOCK_BYTES
    patched: contextlib.AbstractContextManager[Any] = cast(Any, config).patch(options)
    return patched


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> int:
    """Write tensors by torch.save to a file that gets its name when complete. Return its bytes."""
    with NewFile(path) as new, open(new.fd, "wb", closefd=False) as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(new.fd)
        return os.fstat(new.fd).st_size


def commit(folder: UnfinishedFolder, final: Path, manifest: dict[str, Any]) -> bool:
    """Write the manifest, flush the folder, and rename it to its final name.

    A checkpoint of that name is replaced, and removed once the new name is on disk.

    Returns:
        Whether the names were flushed as well; some file systems can't flush folders.

    Raises:
        UnsafeFileError: The folder belongs to another user, or was replaced.
        FileExistsError: A file with the name of the checkpoint exists.
        OSError: The checkpoint can't be written, or lacks the shards of some ranks; or it was
            written (``folder.has_final_name``), but its name can't be flushed.
    """
    entries = manifest["files"]
    if absent := [rank for rank, entry in enumerate(entries) if not _has_shard(folder.fd, entry)]:
        raise OSError(
            f"rank 0 finds no complete shard of {named_ranks(absent)} in {final.parent}, which "
            "must be the same folder on all nodes"
        )
    body = {"format": "paceline-checkpoint", "version": VERSION, **manifest}
    body["check"] = checksum(body)
    with folder.new_file(MANIFEST) as file:
        file.write(json.dumps(body, indent=1).encode())
        os.fsync(file.fd)
    flushed = folder.complete()
    folder.rename(final)
    parent = os.open(final.parent, os.O_RDONLY)
    try:
        flushed = flush_folder(parent) and flushed
    finally:
        os.close(parent)
    if folder.replaced is not None and not remove_checkpoint(folder.replaced):
        # Not of Paceline, or with files of others: it gets a name that people see.
        with contextlib.suppress(OSError):
            folder.replaced.rename(final.with_name(f"{final.name}.{secrets.token_hex(4)}.replaced"))
    return flushed


def _has_shard(folder_fd: int, entry: ShardEntry) -> bool:
    """Return whether the shard is in the folder, with the size that the manifest has for it."""
    try:
        # Opened, because NFS then asks the server for the size.
        fd = open_regular(entry["name"], dir_fd=folder_fd, follow_links=False)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_size == entry["bytes"]
    finally:
        os.close(fd)


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in ``directory``, newest first, without verifying them."""
    if not directory.is_dir():
        return []
    names = [p for p in directory.iterdir() if _CHECKPOINT_NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(names, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def remove_old(directory: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints. Folders of others with such names remain."""
    own = (path for path in list_checkpoints(directory) if is_checkpoint(path))
    for path in islice(own, keep, None):
        remove_checkpoint(path)


def remove_unfinished(directory: Path) -> list[Path]:
    """Remove the temporary folders of interrupted writes. No write may be in progress.

    A complete checkpoint gets its name if the process ended before that.

    Returns:
        Paths that remain, because Paceline has not written all that they contain.
    """
    remain = []
    # Complete ones first: one that was being removed must not get the name of another.
    for path in sorted(directory.glob(".step-*.tmp"), key=lambda path: not is_complete(path)):
        name = _TEMPORARY_NAME.fullmatch(path.name)
        final = directory / name[1] if name else None
        if final is not None and is_checkpoint(path) and not os.path.lexists(final):
            path.rename(final)
        elif (is_checkpoint(path) and not replaces(final, path)) or not remove_checkpoint(path):
            remain.append(path)
    return remain


def check_writable(directory: Path) -> None:
    """Check that checkpoints can be written to ``directory``, so that errors appear at the start.

    Raises:
        ValueError: The directory can't be created or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            os.write(probe.fileno(), b"x")
    except OSError as error:
        raise ValueError(
            f"checkpoints can't be written to {directory}: {error.strerror}. "
            "HINT: set checkpoint=... of world.epochs to another folder"
        ) from None
