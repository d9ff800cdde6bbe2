"""Figures of a running job, from the newest events of its records.

Shares and rates come from the same analysis as those of a report, over the steps that all tails
contain. current_states.py determines the current state of each rank.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ...plurals import named_ranks
from ...record.ring.states import BESIDE_STATES, ROOTED_OPS, State
from ...record.ring.tail import Tail
from ..figures.losses import collective_name
from ..figures.measured_window import WaitPair, longest_waits, wait_matrix
from ..figures.report import TABLES_DIFFER, analyse_with_window
from ..records.load_run import Run, command_words
from ..records.read_record import Record, mesh_places, parse_record
from .current_states import (
    BlockedCollective,
    RankState,
    age,
    blocked_collectives,
    rank_state,
    with_device_waits,
)

MAX_WAIT_PAIRS = 3
RECENT_S = 10.0  # seconds that a view covers, or MIN_STEPS steps if these take longer
MIN_STEPS = 5
# A rank is blocked after this time in one state, and this number of typical steps.
MIN_BLOCKED_S, _MIN_BLOCKED_STEPS = 1.0, 3.0


@dataclass(frozen=True, kw_only=True)
class LiveView:
    """The state of a running job; times in seconds, shares in [0, 1].

    Figures that need two steps in every tail are None or empty with fewer steps.

    Attributes:
        hosts: Host of each of ``ranks``.
        step: Number of steps that all ranks have completed.
        first_step: First step that the figures cover.
        last_step: Last step that the figures cover.
        states: Share of each state, one entry for each of ``ranks``.
        caused: Share of its time that each other rank waits for a rank, summed over the other
            ranks; one entry for each of ``ranks``.
    """

    command: list[str]
    size: int
    ranks: list[int]
    hosts: list[str]
    elapsed_s: float
    attempt: int
    step: int
    first_step: int | None = None
    last_step: int | None = None
    window_s: float | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    states: list[dict[str, float]] = field(default_factory=list)
    caused: list[float] = field(default_factory=list)
    slowest_rank: int | None = None
    slowest_excess: float | None = None
    waited_for: list[WaitPair] = field(default_factory=list)
    now: list[RankState]
    standing: list[BlockedCollective]
    missing_ranks: list[int]
    silent_hosts: list[str]
    notes: list[str] = field(default_factory=list)
    slowest_real: bool | None = None  # whether the slowest rank is slower by more than chance
    # of each rank along the axes of the mesh; empty where "data" is the only one
    mesh: dict[int, dict[str, int]] = field(default_factory=dict)

    def named(self, ranks: Sequence[int]) -> str:
        """Format ranks with the place in the mesh that they share."""
        return named_ranks(ranks, places=self.mesh)

    def as_dict(self) -> dict[str, Any]:
        return {"format": "paceline-live", "version": 1, **asdict(self)}


@dataclass(frozen=True)
class RankTail:
    """A rank's record, and the tail that it was read from."""

    record: Record
    tail: Tail


def view(
    tails: Sequence[Tail], command: list[str], size: int | None = None, silent: Sequence[str] = ()
) -> LiveView | None:
    """Return the view of these tails, or None if no rank has a record yet.

    Args:
        size: World size, if it is known without the tails.
        silent: Hosts that do not answer.
    """
    ranks, notes = last_attempt(tails)
    if not ranks:
        return None
    records = [rank.record for rank in ranks]
    size = max(size or 0, *(int(record.meta["size"]) for record in records))
    missing = sorted(set(range(size)) - {record.rank for record in records})
    figures, typical = _figures(Run("live", records, missing, [], command))
    doing = with_device_waits(records, [rank_state(rank.record, rank.tail) for rank in ranks])
    long_s = max(MIN_BLOCKED_S, _MIN_BLOCKED_STEPS * typical)
    return LiveView(
        command=command_words(command),
        size=size,
        ranks=[record.rank for record in records],
        hosts=[record.host for record in records],
        elapsed_s=max(age(r.tail.now, int(r.record.meta["started_ns"])) for r in ranks),
        attempt=int(records[0].meta.get("attempt", 0)),
        step=min(now.step for now in doing),
        **figures,
        now=doing,
        standing=blocked_collectives(records, doing, long_s),
        missing_ranks=missing,
        silent_hosts=command_words(list(silent)),
        notes=notes,
        mesh=mesh_places(records),
    )


def last_attempt(tails: Sequence[Tail]) -> tuple[list[RankTail], list[str]]:
    """Return the record of each rank in the last attempt, and notes about unreadable records.

    The record of a process that only started the ranks is ignored.
    """
    notes, ranks = set(), []
    for tail in tails:
        try:
            ranks.append(RankTail(parse_record(tail.data, tail.name), tail))
        except ValueError as error:
            notes.add(str(error))
    last = max((int(rank.record.meta.get("attempt", 0)) for rank in ranks), default=0)
    ranks = [rank for rank in ranks if int(rank.record.meta.get("attempt", 0)) == last]
    sizes = {int(rank.record.meta["size"]) for rank in ranks if _event_count(rank.record)}
    best: dict[int, RankTail] = {}
    for rank in ranks:
        record = rank.record
        if not _event_count(record) and sizes and int(record.meta["size"]) not in sizes:
            continue
        if record.rank not in best or _event_count(record) > _event_count(best[record.rank].record):
            best[record.rank] = rank
    return [best[number] for number in sorted(best)], sorted(notes)


def _recent(records: list[Record]) -> list[Record]:
    """Drop the steps before the most recent ones; see RECENT_S and MIN_STEPS.

    Steps have the same numbers on all ranks.
    """
    rows = [record.events[record.states == State.STEP] for record in records]
    if not all(len(row) for row in rows):
        return records
    last = min(int(row["step"].max()) for row in rows)
    row = rows[0][rows[0]["step"] <= last]
    if len(row) <= MIN_STEPS + 1:
        return records
    early = row["step"][row["end"] < row["end"][-1] - int(RECENT_S * 1e9)]
    first = min(int(early.max(initial=0)), int(row["step"][-MIN_STEPS - 1]))
    return [replace(r, events=r.events[r.events["step"] >= first]) for r in records]


def _event_count(record: Record) -> int:
    return int(np.count_nonzero(~np.isin(record.states, BESIDE_STATES)))


def _figures(run: Run) -> tuple[dict[str, Any], float]:
    """Return the fields of a LiveView that need two steps, and the median step time in seconds.

    The step time is 0 if it is unknown.
    """
    try:
        examined = analyse_with_window(replace(run, records=_recent(run.records)))
    except AssertionError:  # a half-written event that looks complete; not in the next view
        return {}, 0.0
    m, report = examined.measured, examined.report
    steps = m.steps if m is not None else None
    if m is None or steps is None or TABLES_DIFFER in report.doubts:
        return {}, 0.0
    seconds = float(steps.seconds.sum())
    caused = np.zeros(len(run.records)) if m.clocks_unaligned else wait_matrix(m).sum(axis=0)
    found = {
        "first_step": steps.first,
        "last_step": steps.first + len(steps) - 1,
        "window_s": report.window_s,
        "steps_per_s": len(steps) / seconds if seconds else None,
        "samples_per_s": report.samples_per_s,
        "states": report.states,
        "caused": caused.tolist(),
        "slowest_rank": report.slowest_rank,
        "slowest_excess": report.slowest_excess,
        "slowest_real": report.slowest_real,
        "waited_for": longest_waits(m, MAX_WAIT_PAIRS),
    }
    return found, float(np.median(steps.seconds))


# Find the ranks of a running job that wait in collectives which can't complete.
#
# A rank that is in no collective may sleep, download or wait for a file system: it may still
# arrive, so the ranks that wait for it are not deadlocked.

# Their members do not all wait for each other: most wait for the root only.
_ROOTED = {collective_name(op) for op in ROOTED_OPS}


def find_deadlocked_ranks(view: LiveView, stopped: Collection[int] = ()) -> list[int]:
    """Return the ranks that wait in a collective which can't complete, sorted.

    A collective can't complete if members are in different collectives with the same number, or if
    a member that has not begun it has exited, is stopped, is on a host that does not answer, or
    waits in another collective that can't complete.

    Args:
        view: State of the job.
        stopped: Ranks whose process is stopped by a signal.
    """
    absent_for_good = {now.rank for now in view.now if now.process == "ended"} | {*stopped}
    blocked: dict[tuple[str | None, int | None, str | None], BlockedCollective] = {
        (blocked.group, blocked.number, blocked.collective): blocked for blocked in view.standing
    }
    waiting = {
        now.rank: one
        for now in view.now
        if now.doing == "exchange"
        and (one := blocked.get((now.group, now.number, now.collective))) is not None
    }
    counts = Counter((blocked.group, blocked.number) for blocked in view.standing)
    # Begin with all ranks that wait, and remove those whose collective may complete.
    stuck = set(waiting)
    while True:
        never = stuck | absent_for_good
        free = {
            rank
            for rank in stuck
            if counts[waiting[rank].group, waiting[rank].number] == 1
            and _may_complete(waiting[rank], never, absent_for_good, bool(view.silent_hosts))
        }
        if not free:
            return sorted(stuck)
        stuck -= free


def _may_complete(
    one: BlockedCollective, never: set[int], absent_for_good: set[int], hosts_silent: bool
) -> bool:
    """Return whether the collective may complete if the ranks in ``never`` do not arrive.

    absent_for_good: Ranks that take no further part, even in a collective that they have begun.
    """
    awaited = [rank in never for rank in one.absent]
    awaited += [hosts_silent] * one.unseen
    awaited += [True for rank in one.inside if rank in absent_for_good]
    return not all(awaited) or not awaited if one.collective in _ROOTED else not any(awaited)
