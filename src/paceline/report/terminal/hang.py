"""What is told of a job that hangs: in words first, then what every rank is in, and where its
Python stands."""

import itertools
from collections.abc import Mapping, Sequence

from ...analyze.live.current_states import Now, Standing
from ...analyze.live.live_view import View
from ...analyze.records.stacks import STACK_NOT_PERMITTED, innermost_user_frame
from ...security.text import printable
from ..numbers import counted, elapsed
from .top import doing_in_words, numbered, standing_in_words

MOST = 32  # ranks that have a line each


def told(
    view: View | None,
    stacks: Mapping[int, str],
    busy: set[int],
    still_s: float,
    silent: Sequence[str] = (),
) -> str:
    """The report, some lines of text. view: None where no rank has a record. busy: ranks that
    use their processor."""
    lines = [f"paceline: no rank has begun or ended anything for {elapsed(still_s)}"]
    lines += [f"  {line}" for line in causes(view, silent)]
    ranks = view.ranks if view is not None else sorted(stacks)
    now = {one.rank: one for one in view.now} if view is not None else {}
    several = bool(silent) or (view is not None and len(set(view.hosts)) > 1)
    for rank in _chosen(ranks, view)[:MOST]:
        what = doing_in_words(now[rank]) if rank in now else "no record"
        using = ", using its processor" if rank in busy else ""
        where = _where(stacks.get(rank, ""))
        host = f" ({now[rank].host})" if several and rank in now else ""
        lines.append(f"    rank {rank}{host}: {what}{using}{where}")
    if len(ranks) > MOST:
        lines.append(f"    ... and {counted(len(ranks) - MOST, 'more rank')}")
    return "\n".join(map(printable, lines)) + "\n"


def _where(stack: str) -> str:
    frame = innermost_user_frame(stack)
    if frame is not None:
        return f"; stands at {frame}"
    return f"; {STACK_NOT_PERMITTED}" if stack == STACK_NOT_PERMITTED else ""


def causes(view: View | None, silent: Sequence[str]) -> list[str]:
    """What holds the job up, the likeliest first."""
    found = [f"{host} does not answer: it may have lost power or its network" for host in silent]
    if view is None:
        return [
            *found,
            "The script neither calls paceline.init() nor is recorded: only its stacks are known. "
            "HINT: paceline run --record tells more",
        ]
    disagreeing = _disagreeing(view.standing)
    found += disagreeing
    if not disagreeing:
        found += [standing_in_words(one, view) for one in view.standing[:3]]
    if view.missing_ranks:
        why = "nothing is seen" if silent else "it has not joined: no record"
        found.append(f"{why} of rank {numbered(view.missing_ranks)}")
    if not found:
        found += [_alone(now) for now in view.now if now.process == "stopped"]
    if not found and all(now.doing == "input" for now in view.now):
        found.append("every rank waits for its batch: the loader gives none")
    waits = [now for now in view.now if now.doing == "input" and now.for_s is not None]
    if not found and waits:
        found.append(f"rank {numbered([now.rank for now in waits])} waits for a batch")
    if view.standing and all(not one.absent for one in view.standing) and not silent:
        everybody = [one for one in view.standing if len(one.inside) == len(view.ranks)]
        if everybody and not disagreeing:
            found.append("all members are in it: a link between them may be down")
    return found or ["no collective stands: see where each rank is"]


def _disagreeing(standing: Sequence[Standing]) -> list[str]:
    """Ranks that are in different collectives of one group under the same number."""
    return [
        f"ranks disagree about collective {one.number}: rank {numbered(one.inside)} in "
        f"{one.collective}, rank {numbered(other.inside)} in {other.collective}"
        for one, other in itertools.combinations(standing, 2)
        if (one.group, one.number) == (other.group, other.number)
    ]


def _alone(now: Now) -> str:
    return f"rank {now.rank} is stopped by a signal (SIGSTOP)"


def suspect(view: View | None) -> int | None:
    """The rank that the others wait for; None where that is not one."""
    if view is None:
        return None
    stopped = [now.rank for now in view.now if now.process == "stopped"]
    absent = [rank for one in view.standing for rank in one.absent]
    return next(iter([*stopped, *absent, *view.missing_ranks]), None)


def computing(view: View | None, busy: set[int]) -> list[int]:
    """Ranks that compute outside of a collective and of a loader: they may be slow, not stuck."""
    if view is None:
        return sorted(busy)
    free = {now.rank for now in view.now if now.doing in ("script", "starting", "checkpoint")}
    return sorted(free & busy)


def _chosen(ranks: Sequence[int], view: View | None) -> list[int]:
    """All ranks, those that are missed first where not all can be told."""
    if view is None or len(ranks) <= MOST:
        return list(ranks)
    missed = {rank for one in view.standing for rank in one.absent}
    missed |= {now.rank for now in view.now if now.process != "running"}
    return sorted(ranks, key=lambda rank: (rank not in missed, rank))
