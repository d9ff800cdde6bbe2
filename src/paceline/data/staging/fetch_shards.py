"""How a set's files come to a host: those that it claims from where they were packed, the others
from the hosts that have claimed them (sharing.py)."""

import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from crc32c import crc32c

from ...security.folders import Folder
from ..format import shard_format
from ..format.meta_schema import MAX_META_BYTES
from ..format.shard_format import DataError, Shard
from .origin import Origin
from .peer_transfer import LOOK_S, QUIET_S, UNCHECKED, Exchange, GoneError

FETCHERS = 4  # threads, each of which asks one host
CHUNK = 256 << 10  # what a kernel has free at once; larger ones can take it several times as long
Step = Callable[[int, int], None]  # shards that are done, and bytes


@dataclass
class Staged:
    """What is there now. here, copied: shards, all and those of this call; fetched: of these from
    other hosts. bytes: that came; read: of these from where the set was packed. left: shards that
    are not here. evicted: other sets that made room. hosts: each host's own, of those that staged
    together. notes: in words. error: what ended this host's part, of those that staged together."""

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


class Bringing:
    """One call's. Numbers are places in ``files``."""

    def __init__(
        self,
        origin: Origin,
        folder: Folder,
        files: list[Shard],
        budget: int,
        exchange: Exchange | None,
        found: Staged,
    ) -> None:
        """budget: bytes that may come. Where that is less than what is missing, what this host
        claims comes first."""
        self._origin, self._folder, self._files = origin, folder, files
        self._exchange, self._found = exchange, found
        self._missing = {at for at, one in enumerate(files) if not whole(folder, one)}
        self._coming: set[int] = set()
        self._small = [at for at, one in enumerate(files) if not one.samples]
        self._left = budget
        self._all = sum(files[at].bytes for at in self._missing) <= budget
        self._changed = threading.Condition()
        self._news_at = time.monotonic()
        self._stopped = False

    def run(self, threads: int, step: Step) -> None:
        """step: called several times a second; what it raises ends this."""
        self._say_what_it_is()
        here = [at for at in range(len(self._files)) if at not in self._missing]
        for at in here:
            self._of_others(Exchange.tell, at)
        self._of_others(Exchange.ready, lambda: step(0, 0))
        pool = ThreadPoolExecutor(threads + FETCHERS, "paceline-stage")
        try:
            jobs = {pool.submit(self._read) for _ in range(threads)}
            if self._exchange is not None:
                jobs |= {pool.submit(self._fetch) for _ in range(FETCHERS)}
            while jobs:
                done, jobs = wait(jobs, LOOK_S, FIRST_EXCEPTION)
                for job in done:
                    job.result()
                if self._of_others(Exchange.news):
                    self._news()
                step(self._found.copied, self._found.bytes)
        finally:
            self._stopped = True
            self._news()
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self) -> None:
        """What this host claims, until all is claimed or there is no room."""
        while not self._stopped and self._first_missing() is not None:
            number = self._of_others(Exchange.claim)
            if self._exchange is None:
                number = self._first_missing()
            if number is None:
                break
            if self._begins(number, claimed=True):
                self._from_origin(number)
            else:
                self._of_others(Exchange.give_up, number)

    def _fetch(self) -> None:
        """What other hosts have claimed, once they have it."""
        while not self._stopped and self._wanted():
            if self._exchange is None:  # it has gone
                self._read()
                return
            number = self._there()
            if number is None:
                with self._changed:
                    self._changed.wait(LOOK_S)
                    quiet = time.monotonic() - self._news_at > QUIET_S
                if quiet:
                    self._look_after()
            elif self._begins(number):
                self._from_host(number)

    def _wanted(self) -> bool:
        """Whether something is missing that has room."""
        with self._changed:
            return any(at in self._coming or self._fits(at) for at in self._missing)

    def _fits(self, number: int) -> bool:
        """Beside what a set can't be read without."""
        kept = 0
        if number not in self._small:
            due = (at for at in self._small if at in self._missing and at not in self._coming)
            kept = sum(self._files[at].bytes for at in due)
        return self._files[number].bytes + kept <= self._left

    def _first_missing(self) -> int | None:
        """That has room, and that no thread brings."""
        with self._changed:
            some = (at for at in self._missing - self._coming if self._fits(at))
            return min(some, default=None)

    def _there(self) -> int | None:
        """One that another host has. Where there is no room for all, first what no other has."""
        exchange = self._exchange
        with self._changed:
            some = [at for at in self._missing - self._coming if exchange and exchange.has(at)]
            if not self._all and not self._all_kept():
                some = [at for at in some if at in self._small]
            some = [at for at in some if self._fits(at)]
        return exchange.chosen(some) if exchange and some else None

    def _all_kept(self) -> bool:
        """Whether every shard is somewhere, or comes here."""
        exchange, due = self._exchange, self._missing - self._coming
        return exchange is None or all(exchange.has(at) for at in due)

    def _look_after(self) -> None:
        """Nothing has come for a while: where who reads a shard has gone, this host reads it."""
        with self._changed:
            self._news_at = time.monotonic()
            some = [at for at in self._missing - self._coming if self._fits(at)]
        for number in sorted(some):
            if self._stopped:
                return
            if self._of_others(Exchange.take_over, number):
                if self._begins(number):
                    self._from_origin(number)
                return

    def _begins(self, number: int, claimed: bool = False) -> bool:
        """Whether it is to come now, in this thread. One that is claimed, but that another host
        has, comes from there."""
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
        came = False
        try:
            self._written(number, lambda file: _copied(self._origin, self._files[number], file))
            came = True
        finally:
            if not came:
                self._of_others(Exchange.give_up, number)
            self._came(number, came)

    def _from_host(self, number: int) -> None:
        exchange, came = self._exchange, False
        try:
            came = exchange is not None and self._written(
                number, lambda file: exchange.fetch(number, file)
            )
        finally:
            self._came(number, came, fetched=True)

    def _written(self, number: int, write: Callable[[BinaryIO], bool]) -> bool:
        """Under its name, once it is whole."""
        name = self._files[number].file
        try:
            with (
                self._folder.replacing(name, self._origin.mode(name)) as new,
                open(new.fd, "wb", buffering=0, closefd=False) as file,
            ):
                if not write(file):
                    raise _NotWholeError
        except _NotWholeError:
            return False
        return True

    def _came(self, number: int, came: bool, fetched: bool = False) -> None:
        found, one = self._found, self._files[number]
        with self._changed:
            self._coming.discard(number)
            if came:
                self._missing.discard(number)
                found.bytes += one.bytes
                found.read += 0 if fetched else one.bytes
                if number not in self._small:
                    found.copied += 1
                    found.fetched += fetched
                self._news_at = time.monotonic()
            else:
                self._left += one.bytes
            self._changed.notify_all()
        if came:
            self._say_what_it_is()
            self._of_others(Exchange.tell, number)

    def _say_what_it_is(self) -> None:
        """paceline.json, as soon as the index is there: a set is then read from here."""
        meta, small = shard_format.META_FILE, (self._files[at] for at in self._small)
        if all(whole(self._folder, one) for one in small) and self._folder.status(meta) is None:
            with open(self._origin.open(meta), "rb") as file:
                data = file.read(MAX_META_BYTES)
            self._folder.write(meta, data, self._origin.mode(meta))

    def _news(self) -> None:
        with self._changed:
            self._news_at = time.monotonic()
            self._changed.notify_all()

    def _of_others(self, ask: Callable[..., Any], *given: Any) -> Any:
        """What the exchange answers; without one, or when it has gone, None."""
        exchange = self._exchange
        if exchange is None:
            return None
        try:
            return ask(exchange, *given)
        except GoneError:
            self._exchange = None
            return None


class _NotWholeError(Exception):
    """No host has sent the whole file."""


def whole(folder: Folder, one: Shard) -> bool:
    """Whether a file of a set is there: it gets its name when it is."""
    try:
        status = folder.status(one.file)
    except OSError:  # what can't be looked at is not there
        return False
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_size == one.bytes


def _copied(origin: Origin, one: Shard, to: BinaryIO) -> bool:
    """Raises DataError where it is not what was packed."""
    crc, buffer, path = 0, memoryview(bytearray(CHUNK)), origin.path / one.file
    with open(origin.open(one.file), "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while size := file.readinto(buffer):
            crc = crc32c(buffer[:size], crc)
            done = 0
            while done < size:
                done += to.write(buffer[done:size])
    if one.crc not in (crc, UNCHECKED):
        raise DataError(path, -1, 0, "a byte has changed (its checksum is another)")
    return True
