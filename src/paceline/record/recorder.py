"""What hooks call: one recorder a rank, its clock, its ring and its own measured cost."""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .ring import Ring
from .states import State
from .tell import say

# Nanoseconds of CLOCK_MONOTONIC: one clock for all processes of a host.
now = time.monotonic_ns


class Recorder:
    """Records the states of one rank.

    ``step`` is the number of optimizer steps done; it is written into every event.
    With ``enabled=False`` every call does nothing.
    """

    def __init__(
        self, rank: int, size: int, *, enabled: bool = True, folder: Path | None = None
    ) -> None:
        self.enabled = enabled
        self.step = 0
        self.samples = 0  # of this rank since the last optimizer step
        self.started = int(os.environ.get("PACELINE_STARTED_NS", 0)) or _process_start()
        self.extra_cost_ns = 0  # measured inside hooks that do more than write an event
        self.event_cost_ns = 0.0
        self._last_step_end = now()
        self._meta: dict[str, Any] = {}
        self._full = False  # no room for another group's name
        self._ring: Ring | None = None
        if enabled:
            self._meta = _about(rank, size, self.started)
            self._ring = _open_ring(rank, self._meta, folder)
            self.event_cost_ns = self._measure_event_cost()
            self._ring.clear()

    def event(
        self,
        state: int,
        start: int,
        end: int,
        amount: int = 0,
        seq: int = 0,
        group: int = 0,
        op: int = 0,
        peer: int = -1,
    ) -> None:
        """Record that the rank was in ``state`` from ``start`` to ``end`` (ns of ``now()``)."""
        if self._ring is not None:
            self._ring.write(start, end, state, amount, seq, self.step, group, op, peer)

    @contextmanager
    def span(self, state: int) -> Iterator[None]:
        """Record the body of a ``with`` as ``state``, also where it raises."""
        start = now()
        try:
            yield
        finally:
            self.event(state, start, now())

    def end_of_step(self) -> None:
        """Mark the end of an optimizer step, with the samples that went into it."""
        end = now()
        self.event(State.STEP, self._last_step_end, end, amount=self.samples)
        self._last_step_end = end
        self.samples = 0
        self.step += 1
        if self._ring is not None and self.step % 32 == 0:
            self._ring.cost_ns = self.cost_ns()

    def new_group(self, name: str, size: int, rank: int) -> int:
        """A number for the process group ``name`` (the same name on all its ranks); 0, and a
        warning, where the record's header has no room for more: it is not recorded then."""
        groups = self._meta.setdefault("groups", {})
        number = str(len(groups) + 1)
        groups[number] = {"name": name, "size": size, "rank": rank}
        try:
            if self._ring is not None:
                self._ring.describe(self._meta)
        except ValueError:
            del groups[number]
            if not self._full:
                self._full = True
                say(f"warning: process group {name!r} and those after it are not recorded\n")
            return 0
        return int(number)

    @property
    def events(self) -> int:
        """Events written so far, those that the ring has overwritten included."""
        return self._ring.written if self._ring is not None else 0

    def cost_ns(self) -> int:
        """What recording has cost this rank so far: events times the measured cost of one,
        and what the wrapper of the process group measured of itself."""
        return int(self.events * self.event_cost_ns) + self.extra_cost_ns

    def snapshot(self) -> bytes:
        """The record as bytes, readable by ``analyze.read``; empty where recording is off."""
        if self._ring is None:
            return b""
        self._ring.cost_ns = self.cost_ns()
        return self._ring.snapshot()

    def _measure_event_cost(self) -> float:
        """Nanoseconds an event takes, clock reads included: median over five batches."""
        batches = []
        for _ in range(5):
            start = now()
            for _ in range(200):
                self.event(State.INPUT, now(), now())
            batches.append((now() - start) / 200)
        return sorted(batches)[2]


def _process_start() -> int:
    """When this process began, on the clock of ``now()``."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:  # not Linux
        return now()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now() - int(age * 1e9)


def _about(rank: int, size: int, started: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "started_ns": started,
        "joined_ns": now(),
        "wall_time": time.time(),
    }


def _open_ring(rank: int, meta: dict[str, Any], folder: Path | None) -> Ring:
    """A ring in the launcher's folder, else in node-local memory, else in the tmp folder."""
    named = folder or os.environ.get("PACELINE_RECORD")
    folders = [Path(named)] if named else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    for place in folders:
        path = place / f"paceline-{os.getuid()}-{os.getpid()}-{now()}-rank-{rank}.ring"
        if named:
            path = place / f"rank-{rank}.ring"
        try:
            ring = Ring(path, meta)
        except OSError as error:
            path.unlink(missing_ok=True)
            problem = error
            continue
        if not named:
            # Nobody else reads it, so nothing of it is left behind however the rank ends.
            ring.unlink()
        return ring
    raise ValueError(
        f"no room for the record of rank {rank} in {' or '.join(map(str, folders))}: {problem}. "
        "HINT: free some space there, or paceline.init(record=False)"
    )
