"""Bring the files of a dataset to a node.

A node reads the files that it claims from the origin (the folder where the dataset was packed), and
fetches the others from the nodes that have claimed them (peer_transfer.py).
"""

import os
import random
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from crc32c import crc32c

from ...security.files import write_all
from ...security.folders import Folder
from ..format import shard_format
from ..format.meta_schema import MAX_META_BYTES, Shard
from ..format.shard_format import DataError
from .origin import Origin
from .peer_transfer import PEER_CHECK_DELAY_S, POLL_INTERVAL_S, PeerTransfer, StoreLostError
from .shard_server import NO_CHECKSUM

FETCHERS = 4  # threads that fetch shards, each from one host at a time
CHUNK = 256 << 10  # bytes; the kernel can take several times as long to allocate larger ones
Step = Callable[[int, int], None]  # arguments: number of copied shards, bytes


@dataclass
class Staged:
    """Result of staging a dataset on one node.

    Attributes:
        folder: Folder of the staged dataset.
        shards: Number of shards of the dataset.
        host: Name of the node.
        here: Number of shards that are now on this node.
        copied: Number of shards that this call brought to the node.
        fetched: Number of shards in ``copied`` that came from other nodes.
        bytes: Bytes that this call brought to the node.
        read: Bytes in ``bytes`` that were read from the origin.
        seconds: Duration of this call.
        left: File names of the shards that are not on this node.
        evicted: Folder names of other datasets that were removed to make room.
        hosts: Results of all nodes that staged together, one dictionary each.
        notes: Messages for the user.
        error: Error that ended staging on this node, if nodes staged together.
    """

    folder: Path
    shards: int
    host: str = ""
    here: int = 0
    copied: int = 0
    fetched: int = 0
    bytes: int = 0
    read: int = 0
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    hosts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""


class ShardFetcher:
    """Transfer of the missing files of one ``stage`` call. Numbers are indices into ``files``."""

    def __init__(
        self,
        origin: Origin,
        folder: Folder,
        files: list[Shard],
        budget: int,
        exchange: PeerTransfer | None,
        found: Staged,
    ) -> None:
        """Find the files that are missing on this node.

        Args:
            budget: Maximum number of bytes to transfer. If it is less than the missing bytes, the
                files that this node claims are transferred first.
        """
        self._origin, self._folder, self._files = origin, folder, files
        self._exchange, self._found = exchange, found
        self._missing = {at for at, file in enumerate(files) if not whole(folder, file)}
        self._coming: set[int] = set()
        self._small = [at for at, file in enumerate(files) if not file.samples]
        self._left = budget
        self._all = sum(files[at].bytes for at in self._missing) <= budget
        self._changed = threading.Condition()
        self._news_at = time.monotonic()
        self._stopped = False

    def run(self, threads: int, step: Step) -> None:
        """Transfer the missing files with ``threads`` threads that read from the origin.

        Args:
            step: Called several times a second; an exception that it raises ends the transfer.
        """
        self._write_meta()
        here = [at for at in range(len(self._files)) if at not in self._missing]
        for at in here:
            self._of_others(PeerTransfer.publish, at)
        self._of_others(PeerTransfer.ready, lambda: step(0, 0))
        pool = ThreadPoolExecutor(threads + FETCHERS, "paceline-stage")
        try:
            jobs = {pool.submit(self._read) for _ in range(threads)}
            if self._exchange is not None:
                jobs |= {pool.submit(self._fetch) for _ in range(FETCHERS)}
            while jobs:
                done, jobs = wait(jobs, POLL_INTERVAL_S, FIRST_EXCEPTION)
                for job in done:
                    job.result()
                if self._of_others(PeerTransfer.read_log):
                    self._news()
                step(self._found.copied, self._found.bytes)
        finally:
            self._stopped = True
            self._news()
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self) -> None:
        """Read the files that this node claims, until all are claimed or there is no room."""
        while not self._stopped and self._first_missing() is not None:
            number = self._of_others(PeerTransfer.claim)
            if self._exchange is None:
                number = self._first_missing()
            if number is None:
                break
            if self._begins(number, claimed=True):
                self._from_origin(number)
            else:
                self._of_others(PeerTransfer.give_up, number)

    def _fetch(self) -> None:
        """Fetch the files that other nodes have claimed, as soon as those nodes have them."""
        while not self._stopped and self._wanted():
            if self._exchange is None:  # the store of the job does not answer any more
                self._read()
                return
            number = self._there()
            if number is None:
                with self._changed:
                    self._changed.wait(POLL_INTERVAL_S)
                    quiet = time.monotonic() - self._news_at > PEER_CHECK_DELAY_S
                if quiet:
                    self._look_after()
            elif self._begins(number):
                self._from_host(number)

    def _wanted(self) -> bool:
        """Whether a missing file fits into the remaining budget, or is being transferred."""
        with self._changed:
            return any(at in self._coming or self._fits(at) for at in self._missing)

    def _fits(self, number: int) -> bool:
        """Whether a file fits in addition to the small files, which every dataset needs."""
        kept = 0
        if number not in self._small:
            due = (at for at in self._small if at in self._missing and at not in self._coming)
            kept = sum(self._files[at].bytes for at in due)
        return self._files[number].bytes + kept <= self._left

    def _first_missing(self) -> int | None:
        """Return the first missing file that fits and that no thread transfers, if any."""
        with self._changed:
            some = (at for at in self._missing - self._coming if self._fits(at))
            return min(some, default=None)

    def _there(self) -> int | None:
        """Choose a missing file that another node has; None if there is none.

        Without room for all files, first make sure that every shard is on some node. Until then
        only small files are fetched, and the room is left for shards that no other node has.
        """
        exchange = self._exchange
        with self._changed:
            some = [at for at in self._missing - self._coming if exchange and exchange.has(at)]
            if not self._all and not self._all_kept():
                some = [at for at in some if at in self._small]
            some = [at for at in some if self._fits(at)]
        # at random, so that not all nodes fetch the same shard from one node
        return random.choice(some) if some else None

    def _all_kept(self) -> bool:
        """Whether each missing file is on another node, or is being transferred to this one."""
        exchange, due = self._exchange, self._missing - self._coming
        return exchange is None or all(exchange.has(at) for at in due)

    def _look_after(self) -> None:
        """Take over a file after an interval without progress, if its reader is lost."""
        with self._changed:
            self._news_at = time.monotonic()
            some = [at for at in self._missing - self._coming if self._fits(at)]
        for number in sorted(some):
            if self._stopped:
                return
            if self._of_others(PeerTransfer.take_over, number):
                if self._begins(number):
                    self._from_origin(number)
                return

    def _begins(self, number: int, claimed: bool = False) -> bool:
        """Reserve room for a file, and return whether this thread transfers it now.

        A file that this node has claimed but another node already has is fetched from that node.
        """
        exchange = self._exchange
        with self._changed:
            if number not in self._missing or number in self._coming:
                return False
            if claimed and exchange is not None and exchange.has(number):
                return False
            if not self._fits(number):
                return False
            self._left -= self._files[number].bytes
            self._coming.add(number)
            return True

    def _from_origin(self, number: int) -> None:
        shard = self._files[number]
        self._bring(number, lambda file: _copy(self._origin, shard, file))

    def _from_host(self, number: int) -> None:
        exchange = self._exchange

        def fetch(file: BinaryIO) -> bool:
            return exchange is not None and exchange.fetch(number, file)

        self._bring(number, fetch, fetched=True)

    def _bring(self, number: int, write: Callable[[BinaryIO], bool], fetched: bool = False) -> None:
        """Write a file, which gets its name only when it is complete, and note whether it is."""
        stats, shard, is_whole = self._found, self._files[number], False
        try:
            with (
                self._folder.replacing(shard.file, self._origin.mode(shard.file)) as new,
                open(new.fd, "wb", buffering=0, closefd=False) as file,
            ):
                if not write(file):
                    raise _NotWholeError
            is_whole = True
        except _NotWholeError:
            pass
        finally:
            if not is_whole and not fetched:
                self._of_others(PeerTransfer.give_up, number)
            with self._changed:
                self._coming.discard(number)
                if is_whole:
                    self._missing.discard(number)
                    stats.bytes += shard.bytes
                    stats.read += 0 if fetched else shard.bytes
                    if number not in self._small:
                        stats.copied += 1
                        stats.fetched += fetched
                    self._news_at = time.monotonic()
                else:
                    self._left += shard.bytes
                self._changed.notify_all()
        if is_whole:
            self._write_meta()
            self._of_others(PeerTransfer.publish, number)

    def _write_meta(self) -> None:
        """Write paceline.json once the index is complete: from then on this node reads its copy."""
        meta, small = shard_format.META_FILE, (self._files[at] for at in self._small)
        if all(whole(self._folder, file) for file in small) and self._folder.status(meta) is None:
            with open(self._origin.open(meta), "rb") as file:
                data = file.read(MAX_META_BYTES)
            self._folder.write(meta, data, self._origin.mode(meta))

    def _news(self) -> None:
        with self._changed:
            self._news_at = time.monotonic()
            self._changed.notify_all()

    def _of_others(self, ask: Callable[..., Any], *given: Any) -> Any:
        """Return the answer of the exchange; None without an exchange, or if the store is lost."""
        exchange = self._exchange
        if exchange is None:
            return None
        try:
            return ask(exchange, *given)
        except StoreLostError:
            self._exchange = None
            return None


class _NotWholeError(Exception):
    """No node has sent the whole file."""


def whole(folder: Folder, shard: Shard) -> bool:
    """Whether a file of a dataset is complete: a file gets its name only when it is."""
    try:
        status = folder.status(shard.file)
    except OSError:  # a file whose status can't be read counts as missing
        return False
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_size == shard.bytes


def _copy(origin: Origin, shard: Shard, to: BinaryIO) -> bool:
    """Copy a file from the origin. Raises DataError if its checksum differs from the packed one."""
    crc, buffer, path = 0, memoryview(bytearray(CHUNK)), origin.path / shard.file
    with open(origin.open(shard.file), "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while size := file.readinto(buffer):
            crc = crc32c(buffer[:size], crc)
            write_all(to.fileno(), buffer[:size])
    if shard.crc not in (crc, NO_CHECKSUM):
        raise DataError(path, -1, 0, "a byte has changed (its checksum differs)")
    return True
