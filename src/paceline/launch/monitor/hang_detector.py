"""Detect a hung job, and describe the hang.

The job hangs when no rank has begun or ended an operation for ``timeout`` seconds, and for three
times the longest such interval so far. Then the tails of all records and every rank's stack are
fetched and reported. If a rank still computes, the job may only be slow: that is reported as well,
and the limit is extended by three times.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .live_records import JobSnapshot, rank_of
from .progress import ProgressReport

MAX_EVENTS_PER_RANK = 512
HANG_EXIT_CODE = 124  # same exit code as timeout(1)
_LONGEST_IDLE_FACTOR = 3.0  # times the longest idle interval so far: shorter intervals are normal
_BUSY_LIMIT_FACTOR = 4.0  # times the limit: a computing rank is given no more time than this
_CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True)
class HangReport:
    """Why the job is ended.

    Attributes:
        text: Report for the user.
        awaited_rank: Rank that the others wait for, or None if that is not known.
        silent_hosts: Names of hosts that do not answer.
    """

    text: str
    awaited_rank: int | None
    silent_hosts: list[str]


class HangDetector:
    """Compare the progress of all hosts with the timeout.

    Args:
        timeout: ``--hang-timeout`` in seconds; 0 disables the detection.
        fetch_records: Fetches the given number of events of each rank's record, and the ranks'
            stacks.
    """

    def __init__(self, timeout: float, fetch_records: Callable[[int], JobSnapshot | None]) -> None:
        self._timeout, self._fetch_records = timeout, fetch_records
        self._last_check = time.monotonic()
        self._announced_longer_limit = False
        self._warned_limit_s = 0.0  # limit at which the job was reported as possibly slow

    def check(
        self,
        poll_hosts: Callable[[], Sequence[ProgressReport]],
        write_message: Callable[[str], None],
    ) -> HangReport | None:
        """Return a HangReport if the job must end. ``write_message`` prints other messages."""
        now = time.monotonic()
        if not self._timeout or now - self._last_check < min(_CHECK_INTERVAL_S, self._timeout / 4):
            return None
        self._last_check = now
        reports = poll_hosts()
        idle_s = min(report.idle_s for report in reports)
        longest_idle_s = max(report.longest_idle_s for report in reports)
        limit = max(self._timeout, _LONGEST_IDLE_FACTOR * longest_idle_s)
        if longest_idle_s > self._timeout and not self._announced_longer_limit:
            self._announced_longer_limit = True
            write_message(
                f"paceline: --hang-timeout {self._timeout:g}: ranks are silent for "
                f"{longest_idle_s:.1f} s here and go on, so a hang is told after {limit:.1f} s\n"
            )
        if idle_s < limit or (
            self._warned_limit_s and idle_s < _BUSY_LIMIT_FACTOR * self._warned_limit_s
        ):
            self._warned_limit_s = self._warned_limit_s if idle_s >= limit else 0.0
            return None
        return self._judge(
            idle_s, limit, {rank for report in reports for rank in report.busy_ranks}, write_message
        )

    def _judge(
        self,
        idle_s: float,
        limit: float,
        busy_ranks: set[int],
        write_message: Callable[[str], None],
    ) -> HangReport | None:
        from ...analyze.live.live_view import view
        from ...report.terminal.hang import find_computing_ranks, hang_report, suspected_rank

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
        is_hang = bool(self._warned_limit_s) or not computing_ranks
        stacks = {rank_of(tail): tail.stack for tail in snapshot.tails if tail.stack}
        text = hang_report(current_view, stacks, busy_ranks, idle_s, snapshot.silent_hosts)
        if not is_hang:
            self._warned_limit_s = limit
            extra_s = _BUSY_LIMIT_FACTOR * limit - idle_s
            ranks = ", ".join(map(str, computing_ranks))
            write_message(
                f"{text}  Rank {ranks} computes, so it may be slow and not stuck: it has "
                f"{extra_s:.0f} s more. HINT: a longer --hang-timeout, or 0 for none\n"
            )
            return None
        return HangReport(text, suspected_rank(current_view), snapshot.silent_hosts)
