"""Messages between the ranks of a process set outside of their meetings, in the job's store.

A rank that waits in a meeting can't ask the others why they do not come. So ranks that wait long
write what they wait for, and ranks that leave write that they have left. A thread reports
operations that some ranks have submitted and others have not, for a long time.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....plurals import named_ranks
from ....record.ring.launcher_messages import notify
from ....security.files import InvalidFileError
from ....security.schema import parse_json

MAX_NAMES = 64  # of waiting operations, in one notice
MAX_INTERVAL_S = 1.0  # between two checks of this rank's operations
MAX_REPORTED = 8  # operations in one report


class Notices:
    """The notices of one process set.

    Args:
        store: A store of torch.distributed, for this set; None without other ranks.
        rank: Global rank of this process.
        members: Global ranks.
    """

    def __init__(self, store: Any, rank: int, members: Sequence[int]) -> None:
        self._store, self._rank, self._members = store, rank, list(members)
        self._written: list[str] = []

    def write_waiting(self, names: Sequence[str]) -> None:
        """Write the names of operations that this rank waits for, if they have changed."""
        shown = sorted(names)[:MAX_NAMES]
        if shown != self._written:
            self._written = shown
            self._set(f"waiting/{self._rank}", json.dumps(shown))

    def read_waiting(self) -> dict[int, list[str]]:
        """Return the names that each rank has written, by global rank."""
        found = {}
        for member in self._members:
            try:
                data = self._get(f"waiting/{member}") or b"[]"
                found[member] = parse_json(data, list[str], f"the notice of rank {member}")
            except InvalidFileError:
                found[member] = []
        return found

    def write_left(self) -> None:
        """Write that this rank takes part in no further meeting."""
        self._set(f"left/{self._rank}", "1")

    def read_left(self) -> list[int]:
        """Return the global ranks that have left."""
        return [member for member in self._members if self._get(f"left/{member}") is not None]

    # The store's host may be lost, and the store is closed at the end of the job.

    def _set(self, key: str, value: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(key, value)

    def _get(self, key: str) -> bytes | None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                return bytes(self._store.get(key)) if self._store.check([key]) else None
        return None


class StallMonitor:
    """Watches the operations of one process set, in a thread of its own.

    It checks this rank's operations a few times within the time limit. Those that wait for longer
    than one such interval are written to the store, where the first rank that has submitted an
    operation compares them after the limit.

    Args:
        rank: Global rank of this process.
        waiting: Returns the names of unfinished operations, with the time of their submission (ns).
        joined: Returns the global ranks that have joined, which submit nothing.
        stop: Ends the wait for an operation, with this error.
        report_s, stop_s: Time limits in seconds; 0 for none.
    """

    def __init__(
        self,
        rank: int,
        notices: Notices,
        waiting: Callable[[], Mapping[str, int]],
        joined: Callable[[], Sequence[int]],
        stop: Callable[[str], None],
        report_s: float,
        stop_s: float,
    ) -> None:
        self._rank, self._notices, self._waiting, self._stop = rank, notices, waiting, stop
        self._joined = joined
        self._report_s, self._stop_s = report_s, stop_s
        self._interval_s = min([MAX_INTERVAL_S, *[s / 4 for s in (report_s, stop_s) if s]])
        self._reported: set[tuple[str, int]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-stalls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._check(time.monotonic_ns())

    def _check(self, now_ns: int) -> None:
        ages = {name: (now_ns - at) / 1e9 for name, at in self._waiting().items()}
        self._notices.write_waiting([n for n, age in ages.items() if age >= self._interval_s])
        stopped = [n for n, age in ages.items() if self._stop_s and age > self._stop_s]
        late = [n for n, age in ages.items() if self._report_s and age > self._report_s]
        submitted = {(name, self._waiting().get(name, 0)) for name in late}
        self._reported &= submitted
        fresh = [name for name, at in submitted if at and (name, at) not in self._reported]
        if not (fresh or stopped):
            return
        joined = self._joined()
        read = self._notices.read_waiting()
        by_rank = {rank: names for rank, names in read.items() if rank not in joined}
        still = self._waiting()  # an operation that has ended meanwhile has all its ranks
        if stopped := [name for name in stopped if name in still]:
            self._stop(describe_stall(stopped, by_rank, self._stop_s))
            self._ended.set()
        fresh = [name for name in fresh if name in still]
        self._reported |= {(name, still[name]) for name in fresh}
        own = [n for n in fresh if self._rank == min(_submitters(n, by_rank), default=self._rank)]
        if own and not stopped:
            notify(f"paceline: {describe_stall(own, by_rank, self._report_s)}\n")


def _submitters(name: str, by_rank: Mapping[int, Sequence[str]]) -> list[int]:
    return [rank for rank, names in by_rank.items() if name in names]


def describe_stall(
    names: Sequence[str], by_rank: Mapping[int, Sequence[str]], seconds: float
) -> str:
    """Return who has submitted these operations, who has not, and what those wait for.

    by_rank: operations that each rank waits for.
    """
    parts = []
    others: set[int] = set()
    for name in sorted(names)[:MAX_REPORTED]:
        have = _submitters(name, by_rank)
        missing = [rank for rank in by_rank if rank not in have]
        others.update(missing)
        parts.append(f"{name!r} by {named_ranks(have) or 'no rank'}, not by {named_ranks(missing)}")
    if len(names) > MAX_REPORTED:
        parts.append(f"and {len(names) - MAX_REPORTED} more")
    waits = [
        f"rank {rank} waits for {by_rank[rank][0]!r}" for rank in sorted(others) if by_rank[rank]
    ]
    instead = f" ({'; '.join(waits[:MAX_REPORTED])})" if waits else ""
    return (
        f"stalled for more than {seconds:g} s: submitted {'; '.join(parts)}{instead}. HINT: call "
        "the same operations under the same names on all ranks: as many batches on each, or "
        "hvd.join() on ranks that have no more data"
    )
