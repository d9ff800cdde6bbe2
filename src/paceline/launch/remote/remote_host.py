"""A host of the job that is another one: its agent, seen from the launcher over a channel."""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...security.folders import NewFile, open_subfolder
from ..channel import BrokenError, Channel
from ..monitor.output import Output
from ..monitor.progress import Progress

PULSE = 5.0  # seconds between two questions whether the other side is there
# So many of them without an answer: the host is lost. Counted and not timed, so that a launcher
# that was stopped (Ctrl-Z) does not take its own absence for the hosts'.
UNANSWERED = 24
DUE_SECONDS = 60.0  # for what takes no time
LOCK_SECONDS = 0.1  # for another message to be sent
ENDINGS = (".ring", ".lines")  # of a record's files


class SilentError(ValueError):
    """A host did not answer in time."""


class There:
    """Speaks to the agent of one host. A thread reads what it says.

    name: of the host. address: by which the other hosts reach it. abort: breaks a connection
    that nobody reads at the other end. every: seconds between two questions whether it is there.
    """

    def __init__(self, name: str, channel: Channel, abort: Callable[[], None]) -> None:
        self.name, self.address = name, ""
        self._abort = abort
        self.hello: dict[str, Any] = {}
        self._output: Output | None = None
        self.run = ""  # the job's name
        self.record: Path | None = None  # where files go that the host sends
        # Called with what the host says of its records' tails; must take no time.
        self.on_tail: Callable[[dict[str, Any], bytes], None] = lambda message, raw: None
        self.ending = False  # its scheduler has asked its agent to end
        self.watched = False  # its silence means something: not while it imports torch
        self._channel = channel
        self.record_error = ""  # why its records could not be kept
        self._incoming: tuple[Path, NewFile] | None = None  # a record's file that comes in pieces
        self._answers: deque[dict[str, Any]] = deque()
        self._deaths: deque[tuple[int, int, float]] = deque()
        self._news = threading.Condition()
        self._running: set[int] = set()
        self._why: dict[int, str] = {}  # ranks that could not be started
        self._trouble, self._status = "", -int(signal.SIGKILL)
        self._heard = time.monotonic()
        self._unanswered, self._busy = 0, False
        self._offset = 0.0  # of that host's monotonic clock to ours, seconds
        self._round_trip = float("inf")
        self._closing, self._ended = False, threading.Lock()
        # As last heard, when, and when that was asked for.
        self._progress = (Progress(), time.monotonic(), 0.0)
        self._began = 0.0  # when the last rank was started
        self.every = PULSE
        self._sending = threading.Lock()
        self._over = threading.Event()  # nothing more comes
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._pulse, daemon=True).start()

    # what launch.agent asks of a host

    def show(self, output: Output) -> None:
        self._output = output

    def open_store(self, port: int) -> tuple[str, int]:
        self.send(store=port)
        answer = self._due("store")
        return str(answer["address"]), int(answer["store"])

    def close_store(self) -> None:
        self.send(store=None)

    def free_ports(self, count: int) -> list[int]:
        self.send(ports=count)
        return [int(port) for port in self._due("ports")["ports"]]

    def bindings(self) -> dict[str, Any]:
        self.send(bindings=True)
        return dict(self._due("bindings")["bindings"])

    def start(self, rank: int, local_rank: int, variables: dict[str, str]) -> None:
        started = int(variables["PACELINE_STARTED_NS"]) + int(self._offset * 1e9)
        there = {**variables, "PACELINE_STARTED_NS": str(started)}
        self._running.add(rank)
        self._why.pop(rank, None)
        self._began = time.monotonic()
        self.send(start=rank, local_rank=local_rank, variables=there)

    def deaths(self) -> Iterator[tuple[int, int, float]]:
        """Those that have ended since the last call; all, where the host itself is lost."""
        while self._deaths:
            rank, status, at = self._deaths.popleft()
            self._running.discard(rank)
            yield rank, status, at
        if self._trouble:
            for rank in sorted(self._running):
                self._running.discard(rank)
                yield rank, self._status, self._heard

    def signal(self, rank: int, kind: int) -> None:
        self.send(signal=rank, kind=int(kind))

    def can_leave(self, can: bool) -> None:
        self.send(leaves=can)

    def progress(self) -> Progress:
        """Whether its ranks move, as last heard; time that passed since is silence."""
        last, at, asked = self._progress
        if asked < self._began:  # of an earlier attempt, which may have hung
            last, at = Progress(), self._began
        return replace(last, still_s=last.still_s + time.monotonic() - at)

    @property
    def silent(self) -> bool:
        """Whether it has let three questions pass."""
        return time.monotonic() - self._heard > 3 * self.every

    def give_up(self) -> None:
        """The host does not answer, and is not waited for any more."""
        self._lost("was lost with its host, which does not answer")
        self._abort()

    def why(self, rank: int) -> str:
        """What the host itself has to do with a rank's end, or ""."""
        return self._why.get(rank, self._trouble)

    @property
    def trouble(self) -> str:
        """What happened to the host, where it can no longer be asked, or ""."""
        return self._trouble

    def ours(self, at: float) -> float:
        """A time of that host's monotonic clock on ours."""
        return at - self._offset

    # what else the launcher asks

    def send(self, **message: Any) -> None:
        """A host that is lost hears nothing; ``trouble`` says why."""
        try:
            with self._sending:
                self._channel.send(message)
        except OSError as error:
            self._broke(error)

    def offer(self, **message: Any) -> bool:
        """Send a short message where nobody has to wait for that; whether it was sent."""
        if self._trouble or not self._sending.acquire(timeout=LOCK_SECONDS):
            return False
        try:
            if not self._channel.has_room():
                return False
            self._channel.send(message)
        except OSError as error:
            self._broke(error)
            return False
        finally:
            self._sending.release()
        return True

    def answer(self, about: str, seconds: float) -> dict[str, Any]:
        """The next answer that has ``about``.

        Raises ValueError for a mistake that the host's agent has found, or where the host is
        lost or silent for ``seconds``.
        """
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                if (message := self._next_answer(about)) is not None:
                    return message
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SilentError(
                        f"{self.name} did not answer within {seconds:.0f} s ({about}). HINT: is "
                        "the host overloaded, or its file system slow?"
                    )
                self._news.wait(min(left, 0.5))

    def poll_answer(self, about: str) -> dict[str, Any] | None:
        """Return the next answer that has ``about``, or None if it has not come yet.

        Raises:
            ValueError: As ``answer``.
        """
        with self._news:
            return self._next_answer(about)

    def _next_answer(self, about: str) -> dict[str, Any] | None:
        for message in self._answers:
            if about in message or "mistake" in message:
                self._answers.remove(message)
                if "mistake" in message:
                    raise ValueError(f"{self.name}: {message['mistake']}")
                return message
        if self._trouble:
            raise ValueError(f"{self.name} {self._trouble}")
        return None

    def _due(self, about: str) -> dict[str, Any]:
        """An answer that takes no time: a host that does not give it is lost."""
        try:
            return self.answer(about, DUE_SECONDS)
        except SilentError:
            self.give_up()
            raise

    def last_words(self, seconds: float) -> None:
        """Wait for what a host still sends that is leaving: its records."""
        self._over.wait(seconds)

    def close(self) -> None:
        if self._ended.acquire(blocking=False):  # once: its descriptors may be somebody else's then
            self._closing = True
            self._channel.close()

    # its threads

    def _read(self) -> None:
        try:
            while (messages := self._channel.take()) is not None:
                self._heard = time.monotonic()
                self._busy = True  # what takes us long is not the host's silence
                for message, raw in messages:
                    self._hear(message, raw)
                self._busy, self._unanswered = False, 0
            self._lost("was lost with its host: its agent has ended, or the connection broke")
        except BrokenError as error:
            self._lost(f"was lost with its host: it sent {error}")
        except Exception as error:  # a full disk, say: nobody else would tell of it
            told = f"{type(error).__name__}: {error}"
            self._lost(f"was lost: what its host sent could not be handled ({told})")
        finally:
            self._drop_incoming()
            self._over.set()

    def _hear(self, message: dict[str, Any], raw: bytes) -> None:
        if "out" in message:
            assert self._output is not None
            if message["out"] not in self._output.tails:
                return  # it is of an attempt that had more ranks
            self._output.take(message["out"], message["stream"], raw)
        elif "died" in message:
            if message["why"]:
                self._why[message["died"]] = message["why"]
            self._deaths.append((message["died"], message["status"], self.ours(message["at"])))
        elif "ending" in message:
            self.ending = True
        elif "tails" in message:
            self.on_tail(message, raw)
        elif "pong" in message:
            self._learn(message["pong"], message["at"])
            if message["progress"] is not None:
                now = time.monotonic()
                self._progress = (Progress(**message["progress"]), now, message["pong"])
        elif "file" in message:
            self._keep(message["file"], message["start"], message["last"], raw)
        elif "leaving" in message:
            self._status = -int(message["signal"])
            self._lost(message["leaving"])
        else:
            with self._news:
                self._answers.append(message)
                self._news.notify_all()

    def _learn(self, asked: float, at: float) -> None:
        """The offset of the clocks, from the quickest question and answer."""
        now = time.monotonic()
        if now - asked < self._round_trip:
            self._round_trip, self._offset = now - asked, at - (asked + now) / 2

    def _keep(self, name: str, start: int, last: bool, raw: bytes) -> None:
        """A piece of a record's file. Its name is of our own making or it is not written."""
        parts = name.split("/")
        plain = all(part and part.strip(".") and part[0] != "." for part in parts)
        if self.record is None or len(parts) > 2 or not plain or not name.endswith(ENDINGS):
            return
        try:
            self._write(self.record / name, start, last, raw)
        except OSError as error:  # a full disk, say
            self._drop_incoming()
            if not self.record_error:
                self.record_error = error.strerror or str(error)
                sys.stderr.write(
                    f"paceline: the record of {self.name} could not be kept in {self.record} "
                    f"({self.record_error}), and is lost. HINT: --record to a disk with room\n"
                )

    def _write(self, path: Path, start: int, last: bool, raw: bytes) -> None:
        assert self.record is not None
        if start == 0:
            self._drop_incoming()
            self.record.mkdir(parents=True, exist_ok=True)
            if path.parent != self.record:
                os.close(open_subfolder(path.parent))  # no link
            self._incoming = (path, NewFile(path))
        if self._incoming is None or self._incoming[0] != path:
            return  # its beginning did not come, or could not be written
        file = self._incoming[1]
        file.write(raw)
        if last:
            file.commit()
            self._incoming = None

    def _drop_incoming(self) -> None:
        """Remove a file that did not come to its end."""
        if self._incoming is not None:
            self._incoming[1].discard()
            self._incoming = None

    def _pulse(self) -> None:
        """Ask whether the host is there; often at first, which also compares the clocks."""
        wait = 0.02
        while not self._closing and not self._trouble:
            if self._unanswered > UNANSWERED and self.watched and not self._busy:
                self._lost(
                    f"was lost with its host: {UNANSWERED} questions in "
                    f"{UNANSWERED * self.every:.0f} s were not answered"
                )
                self._abort()
                return
            self._unanswered += wait >= self.every
            # One that does not read must not stop the clock: ask only where there is room.
            self.offer(ping=time.monotonic())
            time.sleep(wait)
            wait = min(wait * 2, self.every)

    def _broke(self, error: OSError) -> None:
        self._lost(f"was lost with its host: the connection broke ({error.strerror})")

    def _lost(self, why: str) -> None:
        if not self._closing and not self._trouble:
            with self._news:
                self._trouble = why
                self._news.notify_all()
