"""Report of a hang: likely causes, then each rank's operation and the line its Python is at."""

import itertools
from collections.abc import Mapping, Sequence

from ...analyze.live.current_states import BlockedCollective, RankState
from ...analyze.live.live_view import View
from ...analyze.records.stacks import STACK_NOT_PERMITTED, innermost_user_frame
from ...security.text import printable
from ..numbers import counted, elapsed
from .top import doing_in_words, numbered, standing_in_words

MAX_LISTED_RANKS = 32


def hang_report(
    view: View | None,
    stacks: Mapping[int, str],
    busy: set[int],
    still_s: float,
    silent: Sequence[str] = (),
) -> str:
    """Return the report as text.

    view: State of all ranks; None if no rank has a record.
    stacks: Python stack of each rank.
    busy: Ranks that use CPU time.
    still_s: Seconds without progress on any rank.
    silent: Hosts that do not answer.
    """
    lines = [f"paceline: no rank has begun or ended anything for {elapsed(still_s)}"]
    lines += [f"  {line}" for line in likely_causes(view, silent)]
    ranks = view.ranks if view is not None else sorted(stacks)
    now = {one.rank: one for one in view.now} if view is not None else {}
    several = bool(silent) or (view is not None and len(set(view.hosts)) > 1)
    for rank in _ordered_ranks(ranks, view)[:MAX_LISTED_RANKS]:
        what = doing_in_words(now[rank]) if rank in now else "no record"
        using = ", using its processor" if rank in busy else ""
        where = _position(stacks.get(rank, ""))
        host = f" ({now[rank].host})" if several and rank in now else ""
        lines.append(f"    rank {rank}{host}: {what}{using}{where}")
    if len(ranks) > MAX_LISTED_RANKS:
        lines.append(f"    ... and {counted(len(ranks) - MAX_LISTED_RANKS, 'more rank')}")
    return "\n".join(map(printable, lines)) + "\n"


def _position(stack: str) -> str:
    frame = innermost_user_frame(stack)
    if frame is not None:
        return f"; stands at {frame}"
    return f"; {STACK_NOT_PERMITTED}" if stack == STACK_NOT_PERMITTED else ""


def likely_causes(view: View | None, silent: Sequence[str]) -> list[str]:
    """Return sentences about what the job waits for, the likeliest cause first."""
    found = [f"{host} does not answer: it may have lost power or its network" for host in silent]
    if view is None:
        return [
            *found,
            "The script neither calls paceline.init() nor is recorded: only its stacks are known. "
            "HINT: paceline run --record tells more",
        ]
    mismatches = _mismatches(view.standing)
    found += mismatches
    if not mismatches:
        found += [standing_in_words(one, view) for one in view.standing[:3]]
    if view.missing_ranks:
        why = "nothing is seen" if silent else "it has not joined: no record"
        found.append(f"{why} of rank {numbered(view.missing_ranks)}")
    if not found:
        found += [_stopped_sentence(now) for now in view.now if now.process == "stopped"]
    if not found and all(now.doing == "input" for now in view.now):
        found.append("every rank waits for its batch: the loader gives none")
    waits = [now for now in view.now if now.doing == "input" and now.for_s is not None]
    if not found and waits:
        found.append(f"rank {numbered([now.rank for now in waits])} waits for a batch")
    if view.standing and all(not one.absent for one in view.standing) and not silent:
        complete = [one for one in view.standing if len(one.inside) == len(view.ranks)]
        if complete and not mismatches:
            found.append("all members are in it: a link between them may be down")
    return found or ["no collective stands: see where each rank is"]


def _mismatches(standing: Sequence[BlockedCollective]) -> list[str]:
    """Name the ranks that are in different collectives with the same number in one group."""
    return [
        f"ranks disagree about collective {one.number}: rank {numbered(one.inside)} in "
        f"{one.collective}, rank {numbered(other.inside)} in {other.collective}"
        for one, other in itertools.combinations(standing, 2)
        if (one.group, one.number) == (other.group, other.number)
    ]


def _stopped_sentence(now: RankState) -> str:
    return f"rank {now.rank} is stopped by a signal (SIGSTOP)"


def suspected_rank(view: View | None) -> int | None:
    """Return the rank that the others probably wait for, or None."""
    if view is None:
        return None
    stopped = [now.rank for now in view.now if now.process == "stopped"]
    absent = [rank for one in view.standing for rank in one.absent]
    return next(iter([*stopped, *absent, *view.missing_ranks]), None)


def find_computing_ranks(view: View | None, busy: set[int]) -> list[int]:
    """Return the ranks that compute outside of collectives and loaders.

    They may be slow rather than stuck.
    """
    if view is None:
        return sorted(busy)
    free = {now.rank for now in view.now if now.doing in ("script", "starting", "checkpoint")}
    return sorted(free & busy)


def _ordered_ranks(ranks: Sequence[int], view: View | None) -> list[int]:
    """Return all ranks; if there are more than can be listed, the missing ones first."""
    if view is None or len(ranks) <= MAX_LISTED_RANKS:
        return list(ranks)
    missed = {rank for one in view.standing for rank in one.absent}
    missed |= {now.rank for now in view.now if now.process != "running"}
    return sorted(ranks, key=lambda rank: (rank not in missed, rank))
