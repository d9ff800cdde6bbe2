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
from ..channel import Channel, InvalidMessageError
from ..monitor.output import RankOutput
from ..monitor.progress import ProgressReport

HEARTBEAT_INTERVAL_S = 5.0  # seconds between two questions whether the other side is there
# So many of them without an answer: the host is lost. Counted and not timed, so that a launcher
# that was stopped (Ctrl-Z) does not take its own absence for the hosts'.
MAX_MISSED_HEARTBEATS = 24
PROMPT_ANSWER_TIMEOUT_S = 60.0  # for what takes no time
SEND_LOCK_TIMEOUT_S = 0.1  # for another message to be sent
RECORD_SUFFIXES = (".ring", ".lines")  # of a record's files


class HostTimeoutError(ValueError):
    """A host did not answer in time."""


class RemoteHost:
    """Speaks to the agent of one host. A thread reads what it says.

    name: of the host. address: by which the other hosts reach it. abort: breaks a connection
    that nobody reads at the other end. every: seconds between two questions whether it is there.
    """

    def __init__(self, name: str, channel: Channel, abort: Callable[[], None]) -> None:
        self.name, self.address = name, ""
        self._abort = abort
        self.hello: dict[str, Any] = {}
        self._output: RankOutput | None = None
        self.run_id = ""  # the job's name
        self.record_folder: Path | None = None  # where files go that the host sends
        # Called with what the host says of its records' tails; must take no time.
        self.on_tail: Callable[[dict[str, Any], bytes], None] = lambda message, raw: None
        self.termination_requested = False  # its scheduler has asked its agent to end
        self.expects_heartbeats = False  # its silence means something: not while it imports torch
        self._channel = channel
        self.record_error = ""  # why its records could not be kept
        self._incoming: tuple[Path, NewFile] | None = None  # a record's file that comes in pieces
        self._answers: deque[dict[str, Any]] = deque()
        self._exits: deque[tuple[int, int, float]] = deque()
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._start_errors: dict[int, str] = {}  # ranks that could not be started
        self._failure, self._exit_status_when_lost = "", -int(signal.SIGKILL)
        self._last_message_at = time.monotonic()
        self._missed_heartbeats, self._handling_messages = 0, False
        self._clock_offset_s = 0.0  # of that host's monotonic clock to ours, seconds
        self._round_trip = float("inf")
        self._closing, self._close_once = False, threading.Lock()
        # As last heard, when, and when that was asked for.
        self._progress = (ProgressReport(), time.monotonic(), 0.0)
        self._last_start_at = 0.0  # when the last rank was started
        self.heartbeat_interval_s = HEARTBEAT_INTERVAL_S
        self._send_lock = threading.Lock()
        self._reader_done = threading.Event()  # nothing more comes
        threading.Thread(target=self._read_messages, daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    # what launch.agent asks of a host

    def set_output(self, output: RankOutput) -> None:
        self._output = output

    def open_store(self, port: int) -> tuple[str, int]:
        self.send(store=port)
        wait_for_answer = self._prompt_answer("store")
        return str(wait_for_answer["address"]), int(wait_for_answer["store"])

    def close_store(self) -> None:
        self.send(store=None)

    def free_ports(self, count: int) -> list[int]:
        self.send(ports=count)
        return [int(port) for port in self._prompt_answer("ports")["ports"]]

    def bindings(self) -> dict[str, Any]:
        self.send(bindings=True)
        return dict(self._prompt_answer("bindings")["bindings"])

    def start(self, rank: int, local_rank: int, variables: dict[str, str]) -> None:
        started = int(variables["PACELINE_STARTED_NS"]) + int(self._clock_offset_s * 1e9)
        host_variables = {**variables, "PACELINE_STARTED_NS": str(started)}
        self._running.add(rank)
        self._start_errors.pop(rank, None)
        self._last_start_at = time.monotonic()
        self.send(start=rank, local_rank=local_rank, variables=host_variables)

    def take_exits(self) -> Iterator[tuple[int, int, float]]:
        """Those that have ended since the last call; all, where the host itself is lost."""
        while self._exits:
            rank, status, at = self._exits.popleft()
            self._running.discard(rank)
            yield rank, status, at
        if self._failure:
            for rank in sorted(self._running):
                self._running.discard(rank)
                yield rank, self._exit_status_when_lost, self._last_message_at

    def signal(self, rank: int, kind: int) -> None:
        self.send(signal=rank, kind=int(kind))

    def set_can_stop_early(self, can_stop_early: bool) -> None:
        self.send(leaves=can_stop_early)

    def progress(self) -> ProgressReport:
        """Whether its ranks move, as last heard; time that passed since is silence."""
        last, at, asked = self._progress
        if asked < self._last_start_at:  # of an earlier attempt, which may have hung
            last, at = ProgressReport(), self._last_start_at
        return replace(last, idle_s=last.idle_s + time.monotonic() - at)

    @property
    def is_silent(self) -> bool:
        """Whether it has let three questions pass."""
        return time.monotonic() - self._last_message_at > 3 * self.heartbeat_interval_s

    def give_up(self) -> None:
        """The host does not answer, and is not waited for any more."""
        self._mark_lost("was lost with its host, which does not answer")
        self._abort()

    def exit_reason(self, rank: int) -> str:
        """What the host itself has to do with a rank's end, or ""."""
        return self._start_errors.get(rank, self._failure)

    @property
    def failure(self) -> str:
        """What happened to the host, where it can no longer be asked, or ""."""
        return self._failure

    def to_local_time(self, at: float) -> float:
        """A time of that host's monotonic clock on ours."""
        return at - self._clock_offset_s

    # what else the launcher asks

    def send(self, **message: Any) -> None:
        """A host that is lost hears nothing; ``trouble`` says why."""
        try:
            with self._send_lock:
                self._channel.send(message)
        except OSError as error:
            self._connection_broke(error)

    def send_if_ready(self, **message: Any) -> bool:
        """Send a short message where nobody has to wait for that; whether it was sent."""
        if self._failure or not self._send_lock.acquire(timeout=SEND_LOCK_TIMEOUT_S):
            return False
        try:
            if not self._channel.has_room():
                return False
            self._channel.send(message)
        except OSError as error:
            self._connection_broke(error)
            return False
        finally:
            self._send_lock.release()
        return True

    def wait_for_answer(self, key: str, seconds: float) -> dict[str, Any]:
        """The next answer that has ``about``.

        Raises ValueError for a mistake that the host's agent has found, or where the host is
        lost or silent for ``seconds``.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                if (message := self._next_answer(key)) is not None:
                    return message
                left = deadline - time.monotonic()
                if left <= 0:
                    raise HostTimeoutError(
                        f"{self.name} did not answer within {seconds:.0f} s ({key}). HINT: is "
                        "the host overloaded, or its file system slow?"
                    )
                self._changed.wait(min(left, 0.5))

    def poll_answer(self, key: str) -> dict[str, Any] | None:
        """Return the next answer that has ``about``, or None if it has not come yet.

        Raises:
            ValueError: As ``answer``.
        """
        with self._changed:
            return self._next_answer(key)

    def _next_answer(self, key: str) -> dict[str, Any] | None:
        for message in self._answers:
            if key in message or "mistake" in message:
                self._answers.remove(message)
                if "mistake" in message:
                    raise ValueError(f"{self.name}: {message['mistake']}")
                return message
        if self._failure:
            raise ValueError(f"{self.name} {self._failure}")
        return None

    def _prompt_answer(self, key: str) -> dict[str, Any]:
        """An answer that takes no time: a host that does not give it is lost."""
        try:
            return self.wait_for_answer(key, PROMPT_ANSWER_TIMEOUT_S)
        except HostTimeoutError:
            self.give_up()
            raise

    def wait_until_closed(self, seconds: float) -> None:
        """Wait for what a host still sends that is leaving: its records."""
        self._reader_done.wait(seconds)

    def close(self) -> None:
        if self._close_once.acquire(
            blocking=False
        ):  # once: its descriptors may be somebody else's then
            self._closing = True
            self._channel.close()

    # its threads

    def _read_messages(self) -> None:
        try:
            while (messages := self._channel.receive()) is not None:
                self._last_message_at = time.monotonic()
                self._handling_messages = True  # what takes us long is not the host's silence
                for message, raw in messages:
                    self._handle_message(message, raw)
                self._handling_messages, self._missed_heartbeats = False, 0
            self._mark_lost("was lost with its host: its agent has ended, or the connection broke")
        except InvalidMessageError as error:
            self._mark_lost(f"was lost with its host: it sent {error}")
        except Exception as error:  # a full disk, say: nobody else would tell of it
            told = f"{type(error).__name__}: {error}"
            self._mark_lost(f"was lost: what its host sent could not be handled ({told})")
        finally:
            self._drop_incoming()
            self._reader_done.set()

    def _handle_message(self, message: dict[str, Any], raw: bytes) -> None:
        if "out" in message:
            assert self._output is not None
            if message["out"] not in self._output.tails:
                return  # it is of an attempt that had more ranks
            self._output.take(message["out"], message["stream"], raw)
        elif "died" in message:
            if message["why"]:
                self._start_errors[message["died"]] = message["why"]
            self._exits.append(
                (message["died"], message["status"], self.to_local_time(message["at"]))
            )
        elif "ending" in message:
            self.termination_requested = True
        elif "tails" in message:
            self.on_tail(message, raw)
        elif "pong" in message:
            self._update_clock_offset(message["pong"], message["at"])
            if message["progress"] is not None:
                now = time.monotonic()
                self._progress = (ProgressReport(**message["progress"]), now, message["pong"])
        elif "file" in message:
            self._store_record_chunk(message["file"], message["start"], message["last"], raw)
        elif "leaving" in message:
            self._exit_status_when_lost = -int(message["signal"])
            self._mark_lost(message["leaving"])
        else:
            with self._changed:
                self._answers.append(message)
                self._changed.notify_all()

    def _update_clock_offset(self, asked: float, at: float) -> None:
        """The offset of the clocks, from the quickest question and answer."""
        now = time.monotonic()
        if now - asked < self._round_trip:
            self._round_trip, self._clock_offset_s = now - asked, at - (asked + now) / 2

    def _store_record_chunk(self, name: str, start: int, last: bool, raw: bytes) -> None:
        """A piece of a record's file. Its name is of our own making or it is not written."""
        parts = name.split("/")
        plain = all(part and part.strip(".") and part[0] != "." for part in parts)
        if (
            self.record_folder is None
            or len(parts) > 2
            or not plain
            or not name.endswith(RECORD_SUFFIXES)
        ):
            return
        try:
            self._write(self.record_folder / name, start, last, raw)
        except OSError as error:  # a full disk, say
            self._drop_incoming()
            if not self.record_error:
                self.record_error = error.strerror or str(error)
                sys.stderr.write(
                    f"paceline: the record of {self.name} could not be kept in "
                    f"{self.record_folder} ({self.record_error}), and is lost. "
                    "HINT: --record to a disk with room\n"
                )

    def _write(self, path: Path, start: int, last: bool, raw: bytes) -> None:
        assert self.record_folder is not None
        if start == 0:
            self._drop_incoming()
            self.record_folder.mkdir(parents=True, exist_ok=True)
            if path.parent != self.record_folder:
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

    def _send_heartbeats(self) -> None:
        """Ask whether the host is there; often at first, which also compares the clocks."""
        wait = 0.02
        while not self._closing and not self._failure:
            if (
                self._missed_heartbeats > MAX_MISSED_HEARTBEATS
                and self.expects_heartbeats
                and not self._handling_messages
            ):
                self._mark_lost(
                    f"was lost with its host: {MAX_MISSED_HEARTBEATS} questions in "
                    f"{MAX_MISSED_HEARTBEATS * self.heartbeat_interval_s:.0f} s were not answered"
                )
                self._abort()
                return
            self._missed_heartbeats += wait >= self.heartbeat_interval_s
            # One that does not read must not stop the clock: ask only where there is room.
            self.send_if_ready(ping=time.monotonic())
            time.sleep(wait)
            wait = min(wait * 2, self.heartbeat_interval_s)

    def _connection_broke(self, error: OSError) -> None:
        self._mark_lost(f"was lost with its host: the connection broke ({error.strerror})")

    def _mark_lost(self, reason: str) -> None:
        if not self._closing and not self._failure:
            with self._changed:
                self._failure = reason
                self._changed.notify_all()
