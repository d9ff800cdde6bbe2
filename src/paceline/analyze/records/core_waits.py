"""When a rank's threads were ready to run and had no core, from the run delays in its record."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...record.ring.states import CoreWait, State
from .read_record import Record

Ints = npt.NDArray[np.int64]
MAX_BUSY_THREADS = 1 << 16  # of a sample; a larger number is damaged


def place_delays(record: Record, edges: Ints, counts: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return the starts and ends of intervals in which the training thread had no core.

    They are disjoint and in order of time. The record has the run delay between two readings of the
    kernel's counter, and not its position. It is divided among the segments between these readings
    in proportion to their lengths, and placed at the end of each.

    Args:
        edges: Edges of the segments of the rank's window (ns), in order.
        counts: Whether a delay may lie in each segment: not in those in which the rank is blocked.
    """
    start, end, delay = _disjoint_delays(record)
    inside = np.minimum(end, edges[-1]) - np.maximum(start, edges[0])
    delay = np.minimum(delay, end - start) * (inside / np.maximum(end - start, 1))
    start, end, delay = start[inside > 0], end[inside > 0], delay[inside > 0]
    if not len(start):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    cuts = np.unique(np.concatenate([edges, start, end]).clip(edges[0], edges[-1]))
    segment = np.searchsorted(edges, cuts[:-1], "right") - 1
    reading = np.searchsorted(start, cuts[:-1], "right") - 1
    possible = counts[segment] & (reading >= 0) & (cuts[:-1] < end[reading])
    length = np.where(possible, np.diff(cuts), 0)
    whole = np.bincount(reading[possible], length[possible], minlength=len(start))
    part = np.minimum(delay / np.maximum(whole, 1.0), 1.0)
    taken = np.floor(length * part[reading]).astype(np.int64)
    found = taken > 0
    return cuts[1:][found] - taken[found], cuts[1:][found]


def _disjoint_delays(record: Record) -> tuple[Ints, Ints, Ints]:
    """Return start, end and delay of each reading (ns); a damaged record may have overlaps."""
    rows = record.events_in(State.STARVED)
    rows = rows[np.argsort(rows["start"], kind="stable")]
    start, end = rows["start"].copy(), rows["end"].copy()
    if len(start):
        start[1:] = np.maximum(start[1:], np.maximum.accumulate(end)[:-1])
    kept = end > start
    return start[kept], end[kept], rows["amount"][kept]


@dataclass(frozen=True)
class OtherThreads:
    """Computing threads of a rank besides the training thread: means over the window.

    Attributes:
        threads: Number of threads of its process that ran or waited for a core.
        threads_waiting: Number of them that waited for a core.
        worker_threads: Number of such threads of its child processes, e.g. workers of a loader.
        worker_threads_waiting: Number of them that waited for a core.
    """

    threads: float = 0.0
    threads_waiting: float = 0.0
    worker_threads: float = 0.0
    worker_threads_waiting: float = 0.0


def other_threads(record: Record, start: int, end: int) -> OtherThreads:
    """Return the means of the samples that ended between two times (ns); 0 without samples."""
    rows = record.events_in(State.OTHERS_STARVED)
    rows = rows[(rows["end"] > start) & (rows["end"] <= end) & (rows["end"] > rows["start"])]
    busy, waiting = _means(rows, CoreWait.THREADS)
    busy_workers, waiting_workers = _means(rows, CoreWait.CHILDREN)
    return OtherThreads(busy, waiting, busy_workers, waiting_workers)


def _means(rows: npt.NDArray[Any], kind: CoreWait) -> tuple[float, float]:
    """Return the mean number of busy threads, and of those that waited for a core."""
    rows = rows[rows["peer"] == kind]
    length = (rows["end"] - rows["start"]).astype(np.float64)
    if not len(rows):
        return 0.0, 0.0
    busy = np.minimum(rows["seq"], MAX_BUSY_THREADS)
    waiting = np.minimum(rows["amount"], busy * length)
    return float((busy * length).sum() / length.sum()), float(waiting.sum() / length.sum())
