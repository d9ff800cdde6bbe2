"""Detect a hung job, and describe the hang.

A job is silent when no rank has begun or ended an operation for ``timeout`` seconds, and for three
times the longest such interval so far. Then the tails of all records and every rank's stack are
fetched and reported. The report is a warning if the job may go on:

- a rank computes, so that the job may only be slow; the limit is then extended by three times;
- the user has given no timeout, and no rank is known to wait in a collective that can't complete.

Otherwise the job hangs and is ended.
"""

import time
from collections.abc import Callable, Sequence

from ...plurals import named_ranks
from ..job_end import JobEnd
from .live_records import JobSnapshot, rank_of
from .progress import ProgressReport

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
        from ...report.terminal.hang import find_computing_ranks, hang_report

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
