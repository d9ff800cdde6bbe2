"""Find the rank that failed first, detect a hung job, and describe both."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...plurals import named_ranks
from ...record.hooks.error_messages import EXIT_CODE, is_peer_gone
from ...security.text import printable
from ..job_end import JobEnd
from ..linux_processes import signal_name
from .live_records import JobSnapshot, rank_of
from .progress import ProgressReport


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


# Detection of a hung job.
#
# A job is silent when no rank has begun or ended an operation for ``timeout`` seconds, and for
# three times the longest such interval so far. Then the tails of all records and every rank's stack
# are fetched and reported. The report is a warning if the job may go on:
#
# - a rank computes, so that the job may only be slow; the limit is then extended by three times;
# - the user has given no timeout, and no rank is known to wait in a collective that can't complete.
#
# Otherwise the job hangs and is ended.

DEFAULT_HANG_TIMEOUT_S = 300.0
MAX_EVENTS_PER_RANK = 512
HANG_EXIT_CODE = 124  # same exit code as timeout(1)
_LONGEST_IDLE_FACTOR = 3.0  # times the longest idle interval so far: shorter intervals are normal
_NEXT_REPORT_FACTOR = 4.0  # times the idle time of the last report: when the job is judged again
_CHECK_INTERVAL_S = 1.0
_SUSPENDED_S = 10.0  # without a check: the launcher was suspended, and the ranks perhaps as well


class HangDetector:
    """Compare the progress of all hosts with the timeout.

    Args:
        timeout: ``--hang-timeout`` in seconds; 0 disables the detection. None: the user has not
            given it. It is then DEFAULT_HANG_TIMEOUT_S, and a job is ended only if ranks wait in a
            collective that can't complete.
        fetch_records: Fetches the given number of events of each rank's record, and the ranks'
            stacks.
    """

    def __init__(
        self, timeout: float | None, fetch_records: Callable[[int], JobSnapshot | None]
    ) -> None:
        self._ends_silent_jobs = timeout is not None
        self._timeout = DEFAULT_HANG_TIMEOUT_S if timeout is None else timeout
        self._fetch_records = fetch_records
        self._last_check = self._started = time.monotonic()
        self._resumed_at = 0.0  # when the launcher was last seen to run again after a suspension
        self._announced_longer_limit = self._announced_no_record = False
        self._reported_limit_s = 0.0  # limit at which this idle interval was reported; 0: it wasn't
        self._longest_warned_s = 0.0  # longest idle time of which the user was warned

    def check(
        self,
        poll_hosts: Callable[[], Sequence[ProgressReport]],
        write_message: Callable[[str], None],
    ) -> JobEnd | None:
        """Return the report if the job must end. ``write_message`` prints other messages."""
        now = time.monotonic()
        if not self._timeout or now - self._last_check < min(_CHECK_INTERVAL_S, self._timeout / 4):
            return None
        if now - self._last_check > _SUSPENDED_S:
            self._resumed_at = now
        self._last_check = now
        reports = poll_hosts()
        idle_s = min(now - self._resumed_at, *(report.idle_s for report in reports))
        longest_idle_s = max(report.longest_idle_s for report in reports)
        limit = max(self._timeout, _LONGEST_IDLE_FACTOR * longest_idle_s)
        if longest_idle_s > self._timeout and not self._announced_longer_limit:
            self._announced_longer_limit = True
            write_message(
                f"paceline: --hang-timeout {self._timeout:g}: the ranks made no progress for "
                f"{longest_idle_s:.1f} s and then continued, so Paceline reports a hang after "
                f"{limit:.1f} s\n"
            )
        if idle_s < limit:
            self._reported_limit_s = 0.0
            if now - self._started > limit and not any(report.has_record for report in reports):
                self._announce_no_record(write_message)
            return None
        if idle_s < _NEXT_REPORT_FACTOR * self._reported_limit_s:
            return None
        return self._judge(
            idle_s, limit, {rank for report in reports for rank in report.busy_ranks}, write_message
        )

    def _announce_no_record(self, write_message: Callable[[str], None]) -> None:
        if self._announced_no_record or not self._ends_silent_jobs:
            return
        self._announced_no_record = True
        write_message(
            f"paceline: --hang-timeout {self._timeout:g}: the ranks have no record, so that a rank "
            "that uses the CPU (also to wait for a GPU) counts as running. HINT: --record, or "
            "paceline.init() in the script\n"
        )

    def _judge(
        self,
        idle_s: float,
        limit: float,
        busy_ranks: set[int],
        write_message: Callable[[str], None],
    ) -> JobEnd | None:
        from ...analyze.live.live_view import find_deadlocked_ranks, view
        from ...report.terminal.top import find_computing_ranks, hang_report

        snapshot = self._fetch_records(MAX_EVENTS_PER_RANK)
        if snapshot is None or snapshot.ending:
            return None
        current_view = view(
            [tail for tail in snapshot.tails if tail.data], [], None, snapshot.silent_hosts
        )
        if current_view is not None and any(
            now.last_s is not None and now.last_s < limit / 2 for now in current_view.now
        ):
            return None  # a rank has made progress meanwhile
        computing_ranks = find_computing_ranks(current_view, busy_ranks)
        # A rank that a debugger holds ("t") continues.
        stopped = {rank_of(tail) for tail in snapshot.tails if tail.process == "T"}
        deadlocked = find_deadlocked_ranks(current_view, stopped) if current_view else []
        may_end = self._ends_silent_jobs or bool(deadlocked)
        stacks = {rank_of(tail): tail.stack for tail in snapshot.tails if tail.stack}
        text = hang_report(current_view, stacks, busy_ranks, idle_s, snapshot.silent_hosts)
        if may_end and (self._reported_limit_s or not computing_ranks):
            text += "  The job hangs: Paceline ends its ranks.\n"
            return JobEnd(text, HANG_EXIT_CODE, silent_hosts=snapshot.silent_hosts)
        self._reported_limit_s = max(limit, _NEXT_REPORT_FACTOR * self._reported_limit_s)
        if may_end:
            extra_s = _NEXT_REPORT_FACTOR * limit - idle_s
            computes = "computes" if len(computing_ranks) == 1 else "compute"
            ranks = f"{named_ranks(computing_ranks)} {computes}".capitalize()
            write_message(
                f"{text}  {ranks}, so the job may be slow and not hung. Paceline waits "
                f"{extra_s:.0f} s longer. HINT: increase --hang-timeout, or set it to 0 for no "
                "hang detection\n"
            )
        elif idle_s >= _NEXT_REPORT_FACTOR * self._longest_warned_s:
            self._longest_warned_s = idle_s
            write_message(
                f"{text}  The job continues: no rank is known to wait in a collective that can't "
                f"complete. HINT: --hang-timeout {self._timeout:g} ends such a job, "
                "--hang-timeout 0 disables this warning\n"
            )
        return None
