"""Samples of a source as they are packed: read and encoded by threads, ahead of who writes them,
where that is faster than without."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...security.text import printable
from ..sources.source import Source
from .encode import Encoding, Packed, encoded, values
from .statistics import Statistics

AHEAD_BYTES = 256 << 20  # that are encoded and not yet written, at most
CHUNK_BYTES = 1 << 20  # about what one thread takes at a time
CHUNK = 256  # samples, at most
CHUNK_S = 0.25  # of a thread's time, about: so often it is told what is done
LITTLE_S = 100e-6  # of a processor, that a sample takes at most where threads are no gain
TRIED = 4  # samples, read without threads to see whether that is faster
UNTIL = 1024  # chunks for threads from one try to the next, at most
MAX_SAMPLES = 1 << 30  # their order takes eight bytes each
Span = tuple[int, int]  # places in the order: from one, up to another that is not in it


@dataclass
class Encoder:
    """order: which sample comes at which place. measured: of the first so many places the mean and
    deviation are taken. skips: whether samples that can't be read are left out."""

    source: Source
    how: Encoding
    order: Any
    measured: int
    skips: bool

    def encoded(
        self, spans: Iterable[Span], workers: int, ahead: int = AHEAD_BYTES, chunk: int = CHUNK
    ) -> Iterator[tuple[int, Packed | str]]:
        """(place, sample, or why there is none) of these spans in their order. The next span is
        asked for once threads have taken all of the last one. ahead: bytes that are not yet
        written; chunk: samples that one thread takes at a time; both at most."""
        pool = ThreadPoolExecutor(workers, "paceline-pack")
        waiting: deque[tuple[int, Future[tuple[list[Packed | str], float]]]] = deque()
        coming, at, stop = iter(spans), 0, 0
        size, each, more, pace = 0.0, 1, True, _Pace()
        try:
            while more or waiting:
                most = max(min(2 * workers, int(ahead / max(size * each, 1))), 1)
                while more and len(waiting) < most and not pace.alone:
                    if at == stop:
                        at, stop = next(coming, (0, 0))
                        more = at < stop
                        continue
                    last = min(at + each, stop)
                    chosen = self.order[at:last].tolist()
                    waiting.append((at, pool.submit(self._chunk, at, chosen)))
                    at = last
                    pace.handed()
                if waiting:
                    first, done = waiting.popleft()
                    some, took = done.result()
                elif at < stop:
                    last = min(at + min(each, pace.most), stop)
                    with pace.measured(last - at):
                        first, (some, took) = at, self._chunk(at, self.order[at:last].tolist())
                    at = last
                else:
                    at, stop = next(coming, (0, 0))
                    more = at < stop
                    continue
                for place, packed in enumerate(some, first):
                    yield place, packed
                    if isinstance(packed, Packed):  # the largest of late says how many at a time
                        size = max(packed.length, 0.9 * size)
                few = min(CHUNK_BYTES / max(size, 1), CHUNK_S / max(took, 1e-9), chunk)
                each = max(int(few), 1)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _chunk(self, first: int, chosen: list[int]) -> tuple[list[Packed | str], float]:
        """These samples, and seconds of each."""
        began = time.monotonic()
        # in random order: the statistics of the first are as good as any's
        some = [self.one(i, at < self.measured) for at, i in enumerate(chosen, first)]
        return some, (time.monotonic() - began) / len(chosen)

    def one(self, i: int, measured: bool) -> Packed | str:
        """A sample, or why there is none. Raises ValueError where none is left out."""
        try:
            packed = encoded(self.source.load(i), self.how, self.source.label)
            array = values(packed) if measured else None
        except (OSError, ValueError, ArithmeticError, MemoryError, EOFError) as error:
            why = printable(f"{self.source.told}: {_reason(error, self.source, i)}")
            if not self.skips:
                raise ValueError(
                    f"{why}. HINT: mend it and say the same again, which goes on here; or "
                    "on_error skip (--on-error skip) leaves out what can't be read"
                ) from error
            return why
        if array is not None:
            packed.statistics = Statistics(self.source.kind == "images")
            packed.statistics.add(array)
        return packed


class _Pace:
    """Whether samples are read without threads: where nothing is waited for and a sample takes
    little, threads take longer to hand the interpreter's lock to each other than to do the work.
    Found by a few samples at a time that one thread reads alone; ever less often where it was not
    so. alone: whether the next ones are. most: of them."""

    def __init__(self) -> None:
        self.alone, self.most = True, TRIED
        self._handed, self._until = 0, 1

    def handed(self) -> None:
        """A chunk went to a thread."""
        self._handed += 1
        if self._handed >= self._until:
            self.alone, self._handed, self._until = True, 0, min(2 * self._until, UNTIL)

    @contextmanager
    def measured(self, samples: int) -> Iterator[None]:
        began, used = time.perf_counter(), time.thread_time()
        yield
        took, used = time.perf_counter() - began, time.thread_time() - used
        self.alone = used / samples < LITTLE_S and used > took / 2
        if self.alone:
            self.most, self._until = self.most * 4, 1
        else:
            self.most = TRIED


def in_order(samples: int, seed: int) -> Any:
    """Which sample comes at each place: a permutation by the seed. Raises ValueError for more
    samples than a set may have."""
    if samples > MAX_SAMPLES:
        raise ValueError(
            f"the source says that it has {samples:,} samples, and at most {MAX_SAMPLES:,} are "
            "packed. HINT: several sets, which Loader([a, b], ...) takes as one"
        )
    return np.random.default_rng(seed).permutation(samples)


def _reason(error: Exception, source: Source, i: int) -> str:
    """What is wrong with which sample."""
    name = ""
    with suppress(OSError, ValueError):  # it may lie in what can't be read
        name = source.name(i)
    where = f"{name} (sample {i})" if name else f"sample {i}"
    if isinstance(error, FileNotFoundError):
        return f"{where} has vanished"
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{where}: {words}"
