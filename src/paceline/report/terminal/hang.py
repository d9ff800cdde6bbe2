"""Report of a hang: likely causes, then each rank's operation and the line its Python is at."""

import itertools
from collections.abc import Mapping, Sequence

from ...analyze.live.current_states import BlockedCollective
from ...analyze.live.live_view import LiveView
from ...analyze.records.stacks import STACK_NOT_PERMITTED, innermost_user_frame
from ...plurals import named_ranks
from ...security.text import printable
from ..numbers import counted, elapsed
from .top import doing_in_words, standing_in_words

MAX_LISTED_RANKS = 32


def hang_report(
    view: LiveView | None,
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
    lines = [f"paceline: no rank has made progress for {elapsed(still_s)}"]
    lines += [f"  {line}" for line in likely_causes(view, silent)]
    ranks = view.ranks if view is not None else sorted(stacks)
    now = {one.rank: one for one in view.now} if view is not None else {}
    places = view.mesh if view is not None else {}
    several = bool(silent) or (view is not None and len(set(view.hosts)) > 1)
    for rank in _ordered_ranks(ranks, view)[:MAX_LISTED_RANKS]:
        what = doing_in_words(now[rank]) if rank in now else "no record"
        using = ", using CPU time" if rank in busy else ""
        where = _position(stacks.get(rank, ""))
        host = now[rank].host if several and rank in now else ""
        named = named_ranks([rank], places=places, host=host)
        lines.append(f"    {named}: {what}{using}{where}")
    if len(ranks) > MAX_LISTED_RANKS:
        lines.append(f"    ... and {counted(len(ranks) - MAX_LISTED_RANKS, 'more rank')}")
    return "\n".join(map(printable, lines)) + "\n"


def _position(stack: str) -> str:
    frame = innermost_user_frame(stack)
    if frame is not None:
        return f"; at {frame}"
    return f"; {STACK_NOT_PERMITTED}" if stack == STACK_NOT_PERMITTED else ""


def likely_causes(view: LiveView | None, silent: Sequence[str]) -> list[str]:
    """Return sentences about what the job waits for, the likeliest cause first."""
    found = [
        f"Node {host} does not answer: it may have lost power or its network connection."
        for host in silent
    ]
    if view is None:
        return [
            *found,
            "Paceline knows only the stacks: the script does not call paceline.init() and is not "
            "recorded. HINT: paceline run --record DIR also shows each rank's operation",
        ]
    mismatches = _mismatches(view)
    found += mismatches
    if not mismatches:
        found += [standing_in_words(one, view) for one in view.standing[:3]]
    if view.missing_ranks:
        has = "it has" if len(view.missing_ranks) == 1 else "they have"
        why = "." if silent else f": {has} not joined the job."
        found.append(f"Paceline has no record of {named_ranks(view.missing_ranks)}{why}")
    if not found:
        found += [
            f"{view.named([now.rank]).capitalize()} is stopped by a signal (SIGSTOP)."
            for now in view.now
            if now.process == "stopped"
        ]
    if not found and all(now.doing == "input" for now in view.now):
        found.append("Every rank waits for a batch: the data loaders return none.")
    waits = [now for now in view.now if now.doing == "input" and now.for_s is not None]
    if not found and waits:
        verb = "waits" if len(waits) == 1 else "wait"
        found.append(f"{view.named([now.rank for now in waits])} {verb} for a batch.".capitalize())
    if view.standing and all(not one.absent for one in view.standing) and not silent:
        complete = [one for one in view.standing if len(one.inside) == len(view.ranks)]
        if complete and not mismatches:
            found.append(
                "All ranks of the group have entered the collective: the network between them may "
                "be down."
            )
    return found or ["No rank is known to wait in a collective. See the line of each rank below."]


def _mismatches(view: LiveView) -> list[str]:
    """Name the ranks that are in different collectives with the same number in one group."""
    return [
        f"Ranks disagree about collective {one.number}: {_are_in(one, view)}, "
        f"{_are_in(other, view)}."
        for one, other in itertools.combinations(view.standing, 2)
        if (one.group, one.number) == (other.group, other.number)
    ]


def _are_in(one: BlockedCollective, view: LiveView) -> str:
    are = "is" if len(one.inside) == 1 else "are"
    return f"{view.named(one.inside)} {are} in {one.collective}"


def find_computing_ranks(view: LiveView | None, busy: set[int]) -> list[int]:
    """Return the ranks that compute outside of collectives and loaders.

    They may be slow rather than stuck.
    """
    if view is None:
        return sorted(busy)
    free = {now.rank for now in view.now if now.doing in ("script", "starting", "checkpoint")}
    return sorted(free & busy)


def _ordered_ranks(ranks: Sequence[int], view: LiveView | None) -> list[int]:
    """Return all ranks; if there are more than can be listed, the missing ones first."""
    if view is None or len(ranks) <= MAX_LISTED_RANKS:
        return list(ranks)
    missed = {rank for one in view.standing for rank in one.absent}
    missed |= {now.rank for now in view.now if now.process != "running"}
    return sorted(ranks, key=lambda rank: (rank not in missed, rank))
