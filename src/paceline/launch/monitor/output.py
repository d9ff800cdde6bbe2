"""Merging of the output of all ranks: a line that all ranks print is shown once, other lines with
their rank.

A line waits up to ``HOLD_S`` for the other ranks to print the same line. The output of a job with
one rank is forwarded immediately. In addition to stdout and stderr, a rank has a status pipe for
Paceline's messages from inside the rank, which are shown without the rank's number.
"""

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

from ...plurals import format_ranges
from ...security.files import InvalidFileError
from ...security.text import for_terminal
from .rank_messages import MAX_MESSAGE_BYTES, RankMessage, message_of

OUT, ERR, STATUS = 1, 2, 3
HOLD_S = 0.2
FAILURE_HOLD_S = 2.0  # after a rank has failed: others often fail with the same traceback
TAIL_LINES = 20  # number of last lines of each rank that are stored for error reports
MAX_LINES_AFTER = 40  # lines after the last error text of a rank that is still on the screen
ERASE = b"\r\x1b[2K"


class RankOutput:
    """Reader of the ranks' pipes, which writes their merged output to ``out`` and ``err``.

    A thread reads the pipes. It calls ``take_message(rank, message)`` with messages to the
    launcher, and ``take_line(rank, line)`` with lines of output.

    Attributes:
        tails: The last ``TAIL_LINES`` output lines of each rank.
    """

    def __init__(
        self,
        ranks: int,
        out: BinaryIO,
        err: BinaryIO,
        take_message: Callable[[int, Any], None],
        take_line: Callable[[int, str], None] | None = None,
    ) -> None:
        self.tails: dict[int, deque[str]] = {
            rank: deque(maxlen=TAIL_LINES) for rank in range(ranks)
        }
        self._take_message, self._take_line = take_message, take_line
        self._screen = _Screen(out, err)
        self._hold = HOLD_S
        self._streams = {s: _Stream(ranks, s, self._screen) for s in (OUT, ERR)}
        self._status: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe()  # readable: the thread shall look again
        os.set_blocking(self._wake_out, False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._lock = threading.RLock()
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add_rank(self, rank: int, pipes: tuple[int, int, int]) -> None:
        """Read a rank's stdout, stderr and status pipes."""
        with self._lock:
            for stream, fd in zip((OUT, ERR, STATUS), pipes, strict=True):
                os.set_blocking(fd, False)
                self._selector.register(fd, selectors.EVENT_READ, (rank, stream))
        os.write(self._wake_in, b"+")

    def say(self, text: str) -> None:
        """Write a message of the launcher to ``err``, after all pending output of the ranks."""
        with self._lock:
            self.drain()
            self._screen.write(ERR, for_terminal(text).encode())

    def shows_error(self, rank: int) -> bool:
        """Return whether an error text of this rank is among the last lines that were shown."""
        with self._lock:
            at = self._screen.errors.get(rank)
            return at is not None and self._screen.lines - at <= MAX_LINES_AFTER

    def forget(self, rank: int) -> None:
        """Forget the last lines of a rank, and failures: the rank starts again."""
        with self._lock:
            self.tails[rank].clear()
            self._screen.errors.pop(rank, None)
            self._hold = HOLD_S

    def hold_lines(self) -> None:
        """Wait longer for lines that all ranks print, because a rank has failed."""
        self._hold = FAILURE_HOLD_S

    def drain(self, all_of_it: bool = True) -> None:
        """Read what is in the pipes now (all output, if the ranks have ended), and show it.

        Args:
            all_of_it: Also show lines for which other ranks may still print the same.
        """
        deadline = time.monotonic() + 2.0  # a process may write without end
        with self._lock:
            while time.monotonic() < deadline and (ready := self._selector.select(0)):
                for key, _ in ready:
                    self._take(key)
            for stream in self._streams.values():
                stream.flush(0.0 if all_of_it else self._hold)

    def close(self) -> None:
        self.drain()
        self._ending = True
        os.write(self._wake_in, b".")
        self._thread.join(2)

    def _run(self) -> None:
        while not self._ending:
            ready = self._selector.select(HOLD_S / 2)
            with self._lock:
                for key, _ in ready:
                    self._take(key)
                for stream in self._streams.values():
                    stream.flush(self._hold)
                    stream.show_moving()

    def _take(self, key: selectors.SelectorKey) -> None:
        if key.fd not in self._selector.get_map():
            return  # closed after select() returned it
        if key.data is None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_out, 1024)
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
        self._feed(rank, stream, data)

    @property
    def lost(self) -> bool:
        """Whether lines are lost because a stream could not be written (full disk)."""
        return self._screen.lost

    def take(self, rank: int, stream: int, data: bytes) -> None:
        """Process output of a rank on another host; b"" at its end. Any thread may call this."""
        with self._lock:
            self._feed(rank, stream, data)

    def _feed(self, rank: int, stream: int, data: bytes) -> None:
        if stream == STATUS:
            *lines, rest = (self._status.get(rank, b"") + data).split(b"\n")
            self._status[rank] = rest if len(rest) <= MAX_MESSAGE_BYTES else b""
            for line in lines:
                with contextlib.suppress(InvalidFileError):  # the script wrote to the pipe
                    self._handle_message(rank, message_of(line))
            if not data:
                self._status.pop(rank, None)
            return
        for line in self._streams[stream].feed(rank, data):
            text = line.decode(errors="replace")
            self.tails[rank].append(text)
            if self._take_line is not None:
                self._take_line(rank, text)

    def _handle_message(self, rank: int, message: RankMessage) -> None:
        if "say" in message:
            self._streams[ERR].say(rank, for_terminal(message["say"]).encode())
        elif message:
            self._take_message(rank, message)


class _Screen:
    """The output streams, and the unfinished line (a progress bar) to erase on the terminal."""

    def __init__(self, out: BinaryIO, err: BinaryIO) -> None:
        self.to = {OUT: out, ERR: err}
        self.terminal = {s: file.isatty() for s, file in self.to.items()}
        self.moving: int | None = None  # stream of the line that ranks are overwriting
        self.lost = False  # whether a stream could not be written
        self.lines = 0  # number of lines of ranks
        self.errors: dict[int, int] = {}  # number of the last line of each rank's stderr

    def write(self, stream: int, data: bytes) -> None:
        if self.moving is not None and not data.startswith(ERASE) and self.terminal[self.moving]:
            self._write(self.moving, ERASE)
        self.moving = stream if data.endswith(b"\r") else None
        self._write(stream, data)

    def note(self, stream: int, ranks: list[int], lines: int = 1) -> None:
        """Note that the last lines are of these ranks."""
        self.lines += lines
        if stream == ERR:
            self.errors.update(dict.fromkeys(ranks, self.lines))

    def _write(self, stream: int, data: bytes) -> None:
        try:
            self.to[stream].write(data)
            self.to[stream].flush()
        except (BrokenPipeError, ValueError):
            pass  # nothing reads our output any more; the ranks continue
        except OSError as error:
            if not self.lost:
                self.lost = True
                name, other = ("output", ERR) if stream == OUT else ("error", OUT)
                text = f"paceline: lines are lost: standard {name} can't be written"
                self._write(other, f"{text} ({error.strerror})\n".encode())


class _Stream:
    """stdout or stderr of all ranks."""

    def __init__(self, ranks: int, number: int, screen: _Screen) -> None:
        self.ranks = ranks
        self.number = number
        self.screen = screen
        self.partial = [b""] * ranks
        # time of arrival, line, and whether it is a message of Paceline (written unchanged)
        self.queues: list[deque[tuple[float, bytes, bool]]] = [deque() for _ in range(ranks)]
        self._moved = b""

    def feed(self, rank: int, data: bytes) -> list[bytes]:
        """Process a rank's output (b"" at its end) and return its complete lines."""
        if self.ranks == 1 and data:
            self.screen.write(self.number, data)
            self.screen.note(self.number, [rank], data.count(b"\n"))
        *lines, rest = (self.partial[rank] + data).split(b"\n")
        if not data and rest:
            lines.append(rest)
            rest = b""
        # Only the last version of an overwritten line (carriage returns), as on a terminal.
        lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        _, mark, last = rest.rstrip(b"\r").rpartition(b"\r")
        self.partial[rank] = mark + last + (b"\r" if rest.endswith(b"\r") else b"")
        if self.ranks > 1:
            now = time.monotonic()
            self.queues[rank].extend((now, line, False) for line in lines)
        return lines

    def say(self, rank: int, text: bytes) -> None:
        """Queue a message of Paceline from inside a rank, after the lines of that rank."""
        self.queues[rank].append((0.0, text, True))

    def flush(self, hold: float) -> None:
        """Write lines that all ranks have printed, and lines that have waited ``hold`` seconds."""
        while True:
            for queue in self.queues:
                while queue and queue[0][2]:
                    self.screen.write(self.number, queue.popleft()[1])
            heads = {rank: queue[0] for rank, queue in enumerate(self.queues) if queue}
            if not heads:
                return
            oldest = min(heads, key=lambda rank: heads[rank][0])
            since, line, _ = heads[oldest]
            same = [rank for rank, head in heads.items() if head[1] == line and not head[2]]
            everyone = len(same) == self.ranks
            if not everyone and time.monotonic() - since < hold:
                return
            for rank in same:
                self.queues[rank].popleft()
            tag = b"" if everyone else f"[{format_ranges(same)}] ".encode()
            self.screen.write(self.number, tag + line + b"\n")
            self.screen.note(self.number, same)

    def show_moving(self) -> None:
        """Show a rank's line that is being overwritten (a progress bar), on a terminal."""
        if self.ranks == 1 or not self.screen.terminal[self.number]:
            return
        moving = [(rank, text) for rank, text in enumerate(self.partial) if b"\r" in text]
        if moving:
            rank, text = moving[0]
            shown = f"[{rank}] ".encode() + text.strip(b"\r")
            if shown != self._moved:
                self._moved = shown
                self.screen.write(self.number, ERASE + shown + b"\r")
