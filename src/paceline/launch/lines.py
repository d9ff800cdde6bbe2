"""The ranks' output as one: a line that all ranks print is shown once, others carry their rank.

A line waits up to ``HOLD`` seconds for the other ranks to print the same one. With one rank
everything is passed on as it comes.
"""

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from typing import BinaryIO

from ..cluster.host import spans

HOLD = 0.2
TAIL = 20  # last lines kept of each rank, for when it dies


class Output:
    """Reads the ranks' pipes in a thread and writes to ``out`` and ``err``."""

    def __init__(self, ranks: int, out: BinaryIO, err: BinaryIO) -> None:
        self.tails: dict[int, deque[str]] = {rank: deque(maxlen=TAIL) for rank in range(ranks)}
        self._ranks = ranks
        self._streams = {1: _Stream(ranks, out), 2: _Stream(ranks, err)}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, rank: int, stream: int, fd: int) -> None:
        """Read ``fd`` as stream 1 or 2 of a rank."""
        os.set_blocking(fd, False)
        with self._lock:
            self._selector.register(fd, selectors.EVENT_READ, (rank, stream))
        os.write(self._woken, b"+")

    def say(self, text: str) -> None:
        """Paceline's own words: to ``err``, after what the ranks have said so far."""
        if not text.endswith("\r"):  # a line that stays; progress need not wait
            self._settle()
        with self._lock:
            self._streams[2].write(text.encode())

    def _settle(self) -> None:
        """Until what the ranks have written is shown, the lines held back included."""
        deadline = time.monotonic() + 2 * HOLD
        with self._lock:
            for key, _ in self._selector.select(0):
                self._take(key)
        while time.monotonic() < deadline and any(s.held for s in self._streams.values()):
            time.sleep(0.005)

    def drain(self) -> None:
        """Read what is in the pipes now (all of it, once the ranks have ended) and show it."""
        with self._lock:
            while ready := self._selector.select(0):
                for key, _ in ready:
                    self._take(key)
            for stream in self._streams.values():
                stream.flush(all_of_it=True)

    def close(self) -> None:
        self.drain()
        self._ending = True
        os.write(self._woken, b".")
        self._thread.join(2)

    def _run(self) -> None:
        while not self._ending:
            ready = self._selector.select(HOLD / 2)
            with self._lock:
                for key, _ in ready:
                    self._take(key)
                for stream in self._streams.values():
                    stream.flush()

    def _take(self, key: selectors.SelectorKey) -> None:
        if key.fd not in self._selector.get_map():
            return  # closed since it was found ready
        if key.data is None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 1024)
        else:
            self._read(int(key.fd), *key.data)

    def _read(self, fd: int, rank: int, stream: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(fd)
            os.close(fd)
        for line in self._streams[stream].feed(rank, data):
            self.tails[rank].append(line.decode(errors="replace").rstrip("\r\n"))


class _Stream:
    """stdout or stderr of all ranks."""

    def __init__(self, ranks: int, to: BinaryIO) -> None:
        self.ranks = ranks
        self.to = to
        self.terminal = to.isatty()
        self.partial = [b""] * ranks
        self.queues: list[deque[tuple[float, bytes]]] = [deque() for _ in range(ranks)]

    def feed(self, rank: int, data: bytes) -> list[bytes]:
        """Take a rank's bytes (b"" at its end); its whole lines."""
        if self.ranks == 1:
            self.write(data)
        text = self.partial[rank] + data
        *lines, self.partial[rank] = text.split(b"\n")
        if not data and self.partial[rank]:
            lines.append(self.partial[rank])
            self.partial[rank] = b""
        # What a terminal would show of a line that was overwritten: its last version.
        lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        if self.ranks > 1:
            now = time.monotonic()
            self.queues[rank].extend((now, line) for line in lines)
        return lines

    @property
    def held(self) -> bool:
        return any(self.queues)

    def flush(self, all_of_it: bool = False) -> None:
        """Write lines that all ranks share, and those that have waited long enough."""
        while True:
            heads = {rank: queue[0] for rank, queue in enumerate(self.queues) if queue}
            if not heads:
                return
            oldest = min(heads, key=lambda rank: heads[rank][0])
            since, line = heads[oldest]
            same = [rank for rank, (_, other) in heads.items() if other == line]
            everyone = len(same) == self.ranks
            if not everyone and not all_of_it and time.monotonic() - since < HOLD:
                return
            for rank in same:
                self.queues[rank].popleft()
            tag = b"" if everyone else f"[{spans(same)}] ".encode()
            self.write(tag + line + b"\n")

    def write(self, data: bytes) -> None:
        try:
            self.to.write(data)
            self.to.flush()
        except (OSError, ValueError):  # our reader has gone; the ranks go on
            pass
