"""When a job that says nothing hangs, and what is told of it then.

For ``timeout`` seconds no rank has begun or ended anything, and for three times as long as it ever
took before: then the ends of all records and every rank's stack are fetched, and told in words.
Where a rank still computes the job may be merely slow: that is told as well, and it has three
times as long again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .live_records import Seen, rank_of
from .progress import Progress

EVENTS = 512  # of each rank, that the report is made from
CODE = 124  # the exit code of a job that was ended because it hung, as timeout's
_USUAL = 3.0  # times the longest silence so far: no more than that is not slow
_SLOW = 4.0  # times the limit: a rank that computes so long without a word is not waited for
_EVERY = 1.0  # s between two looks


@dataclass(frozen=True)
class Hang:
    """Why the job is ended, the rank that the others wait for, where one is known, and hosts that
    do not answer."""

    told: str
    rank: int | None
    silent: list[str]


class Silence:
    """Asks the hosts again and again. look: fetches the ends of the records, with stacks."""

    def __init__(self, timeout: float, look: Callable[[int], Seen | None]) -> None:
        self._timeout, self._look = timeout, look
        self._looked = time.monotonic()
        self._adapted = False  # it was told that the timeout is too short
        self._warned = 0.0  # at which limit it was told that the job may be slow

    def check(
        self, hosts: Callable[[], Sequence[Progress]], say: Callable[[str], None]
    ) -> Hang | None:
        """A Hang if the job is to be ended; ``say`` gets what else is to be told."""
        now = time.monotonic()
        if not self._timeout or now - self._looked < min(_EVERY, self._timeout / 4):
            return None
        self._looked = now
        seen = hosts()
        still = min(host.still_s for host in seen)
        longest = max(host.longest_s for host in seen)
        limit = max(self._timeout, _USUAL * longest)
        if longest > self._timeout and not self._adapted:
            self._adapted = True
            say(
                f"paceline: --hang-timeout {self._timeout:g}: ranks are silent for {longest:.1f} s "
                f"here and go on, so a hang is told after {limit:.1f} s\n"
            )
        if still < limit or (self._warned and still < _SLOW * self._warned):
            self._warned = self._warned if still >= limit else 0.0
            return None
        return self._judge(still, limit, {rank for host in seen for rank in host.busy}, say)

    def _judge(
        self, still: float, limit: float, busy: set[int], say: Callable[[str], None]
    ) -> Hang | None:
        from ...analyze.live.live_view import view
        from ...report.terminal.hang import computing, suspect, told

        looked = self._look(EVENTS)
        if looked is None or looked.ending:
            return None
        shown = view([tail for tail in looked.tails if tail.data], [], None, looked.silent)
        if shown is not None and any(
            now.last_s is not None and now.last_s < limit / 2 for now in shown.now
        ):
            return None  # it has moved meanwhile
        slow = computing(shown, busy)
        over = bool(self._warned) or not slow
        stacks = {rank_of(tail): tail.stack for tail in looked.tails if tail.stack}
        text = told(shown, stacks, busy, still, looked.silent)
        if not over:
            self._warned = limit
            more = _SLOW * limit - still
            ranks = ", ".join(map(str, slow))
            say(
                f"{text}  Rank {ranks} computes, so it may be slow and not stuck: it has "
                f"{more:.0f} s more. HINT: a longer --hang-timeout, or 0 for none\n"
            )
            return None
        return Hang(text, suspect(shown), looked.silent)
