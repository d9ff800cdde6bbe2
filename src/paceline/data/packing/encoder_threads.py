"""Read and encode the samples of a source.

Threads read and encode ahead of the writer; no threads are used if that is faster.
"""

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
from .encode import EncodedSample, EncodingOptions, decoded_array, encode_sample
from .statistics import Statistics

MAX_AHEAD_BYTES = 256 << 20  # encoded and not yet written
CHUNK_BYTES = 1 << 20  # target size of the chunk that one thread encodes
MAX_CHUNK_SAMPLES = 256
CHUNK_S = 0.25  # target duration of a chunk; progress is reported after each
# CPU seconds per sample up to which threads bring no gain.
MAX_CPU_S_WITHOUT_THREADS = 100e-6
TRIAL_SAMPLES = 4  # read without threads to measure whether that is faster
MAX_CHUNKS_BETWEEN_TRIALS = 1024
MAX_SAMPLES = 1 << 30  # the order takes eight bytes for each
Span = tuple[int, int]  # places in the order: start, and stop (exclusive)


@dataclass
class Encoder:
    """Load and encode samples.

    Attributes:
        order: Sample index at each place.
        statistics_places: Number of first places whose statistics are computed.
        skip_unreadable: Whether samples that can't be read are left out.
    """

    source: Source
    options: EncodingOptions
    order: Any
    statistics_places: int
    skip_unreadable: bool

    def encode(
        self,
        spans: Iterable[Span],
        workers: int,
        ahead: int = MAX_AHEAD_BYTES,
        chunk: int = MAX_CHUNK_SAMPLES,
    ) -> Iterator[tuple[int, EncodedSample | str]]:
        """Yield (place, sample, or the reason why it is left out) of these spans in their order.

        The next span is requested once threads have taken all of the previous one. ahead: maximum
        bytes not yet written. chunk: maximum samples that one thread takes at a time.
        """
        pool = ThreadPoolExecutor(workers, "paceline-pack")
        waiting: deque[tuple[int, Future[tuple[list[EncodedSample | str], float]]]] = deque()
        next_spans, at, stop = iter(spans), 0, 0
        size, chunk_samples, more_spans, pace = 0.0, 1, True, _ThreadingPolicy()
        try:
            while more_spans or waiting:
                max_waiting = max(min(2 * workers, int(ahead / max(size * chunk_samples, 1))), 1)
                while more_spans and len(waiting) < max_waiting and not pace.unthreaded:
                    if at == stop:
                        at, stop = next(next_spans, (0, 0))
                        more_spans = at < stop
                        continue
                    chunk_stop = min(at + chunk_samples, stop)
                    chosen = self.order[at:chunk_stop].tolist()
                    waiting.append((at, pool.submit(self._chunk, at, chosen)))
                    at = chunk_stop
                    pace.count_chunk()
                if waiting:
                    first, future = waiting.popleft()
                    results, took = future.result()
                elif at < stop:
                    chunk_stop = min(at + min(chunk_samples, pace.max_samples), stop)
                    with pace.measure(chunk_stop - at):
                        results, took = self._chunk(at, self.order[at:chunk_stop].tolist())
                    first, at = at, chunk_stop
                else:
                    at, stop = next(next_spans, (0, 0))
                    more_spans = at < stop
                    continue
                for place, packed in enumerate(results, first):
                    yield place, packed
                    # A decaying maximum of recent sizes sets the number of samples per chunk.
                    if isinstance(packed, EncodedSample):
                        size = max(packed.length, 0.9 * size)
                few = min(CHUNK_BYTES / max(size, 1), CHUNK_S / max(took, 1e-9), chunk)
                chunk_samples = max(int(few), 1)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _chunk(self, first: int, chosen: list[int]) -> tuple[list[EncodedSample | str], float]:
        """Return these encoded samples, and the seconds per sample."""
        start = time.monotonic()
        # The order is random, so the first samples represent the dataset.
        results = [
            self.encode_one(i, at < self.statistics_places) for at, i in enumerate(chosen, first)
        ]
        return results, (time.monotonic() - start) / len(chosen)

    def encode_one(self, i: int, in_statistics: bool) -> EncodedSample | str:
        """Return an encoded sample, or the reason why it can't be read.

        Raises:
            ValueError: The sample can't be read, and ``skip_unreadable`` is false.
        """
        try:
            loaded = self.source.load(i)
            if self.options.apply is None:
                self.source.check_kind(loaded)
            packed = encode_sample(loaded, self.options, self.source.label)
            array = decoded_array(packed) if in_statistics else None
        except (OSError, ValueError, ArithmeticError, MemoryError, EOFError) as error:
            reason = printable(f"{self.source.description}: {_reason(error, self.source, i)}")
            if not self.skip_unreadable:
                repair = ". HINT: repair the sample and repeat the same command, which continues"
                raise ValueError(
                    f"{reason}{'' if 'HINT: ' in reason else repair}; or leave out unreadable "
                    "samples: on_error='skip' (--on-error skip)"
                ) from error
            return reason
        if array is not None:
            packed.statistics = Statistics(self.source.kind == "images")
            packed.statistics.add(array)
        return packed


class _ThreadingPolicy:
    """Decide whether samples are read without threads.

    If loading does not wait and a sample takes little CPU time, threads spend more time handing
    over the interpreter's lock than they save. This is measured on a few samples that one thread
    reads alone, less and less often if threads were faster.

    Attributes:
        unthreaded: Whether the next samples are read without threads.
        max_samples: Maximum number of them.
    """

    def __init__(self) -> None:
        self.unthreaded, self.max_samples = True, TRIAL_SAMPLES
        self._chunks, self._trial_after_chunks = 0, 1

    def count_chunk(self) -> None:
        self._chunks += 1
        if self._chunks >= self._trial_after_chunks:
            self.unthreaded, self._chunks = True, 0
            self._trial_after_chunks = min(2 * self._trial_after_chunks, MAX_CHUNKS_BETWEEN_TRIALS)

    @contextmanager
    def measure(self, samples: int) -> Iterator[None]:
        start, used = time.perf_counter(), time.thread_time()
        yield
        took, used = time.perf_counter() - start, time.thread_time() - used
        self.unthreaded = used / samples < MAX_CPU_S_WITHOUT_THREADS and used > took / 2
        if self.unthreaded:
            self.max_samples, self._trial_after_chunks = self.max_samples * 4, 1
        else:
            self.max_samples = TRIAL_SAMPLES


def shuffled_order(samples: int, seed: int) -> Any:
    """Return the sample index at each place, a permutation by the seed.

    Raises:
        ValueError: The source has more than MAX_SAMPLES samples.
    """
    if samples > MAX_SAMPLES:
        raise ValueError(
            f"the source has {samples:,} samples; the maximum is {MAX_SAMPLES:,}. HINT: pack "
            "several datasets, which Loader([a, b], ...) concatenates"
        )
    return np.random.default_rng(seed).permutation(samples)


def _reason(error: Exception, source: Source, i: int) -> str:
    """Return which sample can't be read, and why."""
    name = ""
    with suppress(OSError, ValueError):  # the name may be in the unreadable part
        name = source.name(i)
    where = f"{name} (sample {i})" if name else f"sample {i}"
    if isinstance(error, FileNotFoundError):
        return f"{where} no longer exists"
    message = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{where}: {message}"
