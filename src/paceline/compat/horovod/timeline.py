"""Horovod's timeline: a Chrome trace of the negotiation and the exchange of each tensor.

Rank 0 writes it (HOROVOD_TIMELINE, ``hvd.start_timeline``). As in Horovod's own file, a tensor is
a process of the trace, its phases are slices, and the marks in a negotiation are ranks that became
ready. Perfetto (ui.perfetto.dev) and chrome://tracing read the file. It is complete JSON after each
write, so that the timeline of a job that hangs or fails can be read.
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from ...security.files import open_regular
from ...security.outputs import output_target, write_output

FLUSH_INTERVAL_NS = 1_000_000_000
MAX_PENDING_EVENTS = 10_000
NEGOTIATE = "NEGOTIATE_"  # and the operation: ALLREDUCE, BROADCAST, ...
CYCLE = "CYCLE_START"
_END = b"\n]\n"


class Timeline:
    """A timeline file. Its methods may be called from several threads.

    Times are those of ``time.monotonic_ns()``.

    Attributes:
        path: Name of the file.
        mark_cycles: Whether ``cycle`` writes a mark.
    """

    def __init__(self, path: Path, mark_cycles: bool = False) -> None:
        """Create the file, or replace it.

        Raises:
            OSError: The file can't be written.
        """
        self.path, self.mark_cycles = path, mark_cycles
        self._start_ns = self._flushed_ns = time.monotonic_ns()
        self._tensors: dict[str, int] = {}
        self._lock = threading.Lock()
        target = output_target(path)
        since_epoch = (time.time_ns() - time.monotonic_ns() + self._start_ns) // 1000
        args = json.dumps({"start_time_since_epoch_in_micros": since_epoch})
        first = f'[\n{{"ph":"M","name":"process_name","pid":0,"args":{args}}}'.encode()
        write_output(target, first + _END)
        self._file = os.fdopen(open_regular(target, os.O_WRONLY, follow_links=False), "wb")
        self._file.seek(len(first))
        self._lines: list[str] = []

    def slice(
        self, tensor: str, phase: str, start_ns: int, end_ns: int, **args: str | int | list[int]
    ) -> None:
        """Write that a tensor was in a phase (NEGOTIATE_ALLREDUCE, ALLREDUCE, ...).

        Args:
            tensor: Name of the tensor.
            phase: Name of the phase; phases of a tensor may be nested.
            start_ns: Start of the phase.
            end_ns: End of the phase.
            args: Facts about the phase, such as ``dtype`` and ``shape``.
        """
        facts = f',"args":{json.dumps(args)}' if args else ""
        duration = max(end_ns - start_ns, 0) / 1000
        name = json.dumps(phase)
        self._add(tensor, f'"ph":"X","name":{name},"dur":{duration:.3f}{facts}', start_ns)

    def ready(self, tensor: str, rank: int, at_ns: int) -> None:
        """Write that ``rank`` has submitted a tensor that is negotiated."""
        self._add(tensor, f'"ph":"X","name":"{rank}","dur":0', at_ns)

    def cycle(self, at_ns: int) -> None:
        """Write the start of a cycle, if cycles are marked."""
        if self.mark_cycles:
            self._add("", f'"ph":"i","s":"g","name":"{CYCLE}"', at_ns)

    def close(self) -> None:
        """Write the events that are pending, and close the file."""
        with self._lock:
            if not self._file.closed:
                self._flush()
                self._file.close()

    def _add(self, tensor: str, text: str, at_ns: int) -> None:
        since_start = (at_ns - self._start_ns) / 1000
        with self._lock:
            if self._file.closed:
                return
            pid = self._process(tensor) if tensor else 0
            self._lines.append(f'{{{text},"ts":{since_start:.3f},"pid":{pid},"tid":{pid}}}')
            now = time.monotonic_ns()
            if len(self._lines) >= MAX_PENDING_EVENTS or now - self._flushed_ns > FLUSH_INTERVAL_NS:
                self._flushed_ns = now
                try:
                    self._flush()
                except OSError as error:  # the training continues
                    reason = error.strerror or error
                    print(f"paceline: the timeline {self.path} ends: {reason}", file=sys.stderr)
                    self._lines.clear()
                    with contextlib.suppress(OSError):
                        self._file.close()

    def _process(self, tensor: str) -> int:
        """Return the number of a tensor in the trace; write its name if it is new."""
        pid = self._tensors.get(tensor)
        if pid is None:
            pid = self._tensors[tensor] = len(self._tensors) + 1
            for name, args in (
                ("process_name", {"name": tensor}),
                ("process_sort_index", {"sort_index": pid}),
            ):
                facts = json.dumps(args)
                self._lines.append(f'{{"ph":"M","name":"{name}","pid":{pid},"args":{facts}}}')
        return pid

    def _flush(self) -> None:
        if self._lines:
            self._file.write(b"".join(f",\n{line}".encode() for line in self._lines) + _END)
            self._file.flush()
            self._file.seek(-len(_END), os.SEEK_CUR)
            self._lines.clear()


active: Timeline | None = None  # the timeline of this process; None on ranks other than 0


def start_timeline(path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin a timeline, and end the one that is being written.

    Raises:
        ValueError: The file can't be written.
    """
    global active
    stop_timeline()
    try:
        active = Timeline(Path(path), mark_cycles)
    except OSError as error:
        raise ValueError(
            f"the timeline {os.fspath(path)} can't be written: {error.strerror or error}. HINT: "
            "name a file in a folder that exists and that you can write to"
        ) from None


def stop_timeline() -> None:
    """End the timeline of this process, if there is one."""
    global active
    timeline, active = active, None
    if timeline is not None:
        with contextlib.suppress(OSError):  # the file system is full
            timeline.close()
