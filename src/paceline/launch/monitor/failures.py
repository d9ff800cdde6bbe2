"""Find the rank that failed first, and describe its failure."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...record.hooks.error_messages import EXIT_CODE, is_peer_gone
from ...security.text import printable
from ..linux_processes import signal_name


@dataclass
class RankStatus:
    """What the launcher knows about one rank of one attempt.

    Attributes:
        rank: Global rank.
        host: Name of its host if the job has several, else "".
        place: Its place along the axes of a mesh: "data 1, stage 0"; "" if unknown.
        exit_code: Exit code of the process, or minus the signal that killed it; None while it runs.
        ended_at: When it ended, on the launcher's monotonic clock.
        exception: One-line text of an uncaught exception.
        raised_at: When that exception was raised, on the launcher's monotonic clock.
        exception_exit_code: Exit code that the rank announced with the exception.
        finished_code: Exit code that the rank announced before the interpreter's shutdown.
        finished_at: When it announced that.
        host_failure: What happened to its host, if that can no longer be reached.
        stops_on_warning: Whether the rank writes a checkpoint and stops when a signal warns it.
        makes_room: Whether the rank keeps its state in the node's memory and stops when a node has
            returned.
        stopped_at_step: Step of its checkpoint, if it has stopped before the end.
        exit_overdue: Whether it was killed, and did not end in time.
        left_others: Whether it ended with exit code 0 although other ranks still waited for it.
    """

    rank: int
    host: str = ""
    exit_code: int | None = None
    ended_at: float | None = None
    exception: str | None = None
    raised_at: float | None = None
    exception_exit_code: int | None = None
    finished_code: int | None = None
    finished_at: float | None = None
    host_failure: str = ""
    stops_on_warning: bool = False
    makes_room: bool = False
    stopped_at_step: int | None = None
    exit_overdue: bool = False
    left_others: bool = False
    place: str = ""

    def take_message(
        self, message: dict[str, Any], to_local_time: Callable[[float], float]
    ) -> None:
        """Take a message of the rank to the launcher.

        Args:
            message: See ``rank_messages.RankMessage``.
            to_local_time: Converts times of the rank's host.
        """
        if "exception" in message:
            self.exception, self.exception_exit_code = message["exception"], message["code"]
            self.raised_at = to_local_time(message["at"])
        elif "finished" in message:
            self.finished_code, self.finished_at = message["finished"], time.monotonic()
        elif "leaves" in message:
            self.stops_on_warning = bool(message["leaves"])
        elif "makes_room" in message:
            self.makes_room = bool(message["makes_room"])
        elif "left" in message:
            self.stopped_at_step = int(message["left"])
        elif "place" in message:
            self.place = message["place"]

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def is_left(self, before: float) -> bool:
        """Return whether it was killed after it had finished, before this monotonic time (s)."""
        return self.exit_overdue and self.finished_at is not None and self.finished_at < before

    @property
    def failed(self) -> bool:
        if self.stopped_at_step is not None:
            return False  # its work so far is on the disk, whatever ended it later
        if self.raised_at is not None or self.finished_code:
            return True
        if self.exit_code is None or self.finished_code == 0:
            return False  # a process that dies after its script finished has done its work
        return self.exit_code != 0

    @property
    def killed(self) -> bool:
        """Whether something outside of the script ended the rank: a signal, out of memory, its
        host.
        """
        code = self.exit_code
        return self.exception is None and not self.finished_code and code is not None and code < 0

    @property
    def raised_exception(self) -> bool:
        """Whether it ended by an uncaught exception, and not by ``sys.exit``."""
        return not (self.exception or EXIT_CODE).startswith(EXIT_CODE)

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only reports that another rank is gone."""
        return is_peer_gone(self.exception or "")

    @property
    def succeeded(self) -> bool:
        """Whether it ran its script to the end, or is about to end, with exit code 0."""
        code = self.finished_code if self.finished_code is not None else self.exit_code
        return code == 0 and not self.failed and self.stopped_at_step is None

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Key to sort failures by: causes before their consequences, then by time. Time alone would
        mislead, because a killed rank's sockets close before its exit is known.
        """
        times = [t for t in (self.raised_at, self.finished_at, self.ended_at) if t is not None]
        return self.is_consequence, min(times, default=float("inf"))

    @property
    def shell_exit_code(self) -> int:
        """Exit code as a shell would give it: 128 + n after signal n. 1 if it ``left_others``."""
        if self.left_others:
            return 1
        # the rank's own announcement comes before the signal of the launcher
        codes = self.finished_code, self.exception_exit_code, self.exit_code
        code = next((code for code in codes if code is not None), 1)
        return 128 - code if code < 0 else code


def first_failure(ranks: list[RankStatus]) -> RankStatus | None:
    """Return the rank that failed first; other failures may be consequences of it.

    If all failures are consequences, this is the first rank that ended with exit code 0 while the
    others still exchanged data with it.
    """
    failed = [rank for rank in ranks if rank.failed]
    first = min(failed, key=lambda rank: rank.sort_key, default=None)
    if first is None or not first.is_consequence:
        return first
    left = min(filter(lambda rank: rank.succeeded, ranks), key=lambda r: r.sort_key, default=None)
    if left is None:
        return first
    left.left_others = True
    return left


def describe_failure(
    failed_rank: RankStatus, tail: list[str], others: int, waiting: RankStatus | None = None
) -> str:
    """Describe what happened to the first rank that failed.

    Args:
        failed_rank: The rank.
        tail: Its last lines of output, if they are to be shown.
        others: Number of the other ranks.
        waiting: A rank that failed because the first one ended.
    """
    if failed_rank.left_others:
        what = "ended with exit code 0 while other ranks still exchanged data with it"
    elif failed_rank.exception is not None:
        what = f"failed: {printable(failed_rank.exception)}"
    elif failed_rank.host_failure:
        what = printable(failed_rank.host_failure)
    elif failed_rank.exit_code is not None and failed_rank.exit_code < 0:
        what = f"was killed by {signal_name(-failed_rank.exit_code)}"
    else:
        what = f"ended with exit code {failed_rank.exit_code}"
    where = f" ({printable(failed_rank.place)})" if failed_rank.place else ""
    where += f" on {printable(failed_rank.host)}" if failed_rank.host else ""
    lines = [f"paceline: rank {failed_rank.rank}{where} {what}"]
    if tail:
        lines.append(f"  last lines of rank {failed_rank.rank}:")
        lines += [f"    {printable(line)}" for line in tail]
    if failed_rank.exit_code == -signal.SIGKILL and not failed_rank.host_failure:
        lines.append(
            "  HINT: if no user or scheduler killed it, the node was probably out of "
            "memory: see dmesg"
        )
    if failed_rank.left_others:
        if waiting is not None:
            lines.append(f"  rank {waiting.rank}: {printable(waiting.exception or '')}")
        lines.append(
            "  HINT: all ranks must call the same collectives. Look for sys.exit, return or break "
            f"that only rank {failed_rank.rank} reaches, or for fewer batches on it"
        )
    if others:
        lines.append(
            f"  Paceline ended the {'other rank' if others == 1 else f'{others} other ranks'}."
        )
    return "\n".join(lines) + "\n"
