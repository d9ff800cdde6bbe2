"""Compute states, efficiencies, losses and waits of all ranks in the measured window."""

from dataclasses import dataclass, replace

import numpy as np

from ..records.clock_alignment import Clocks
from ..records.match_collectives import NO_INDEX, MatchedCommunication, assign_blocked_time
from ..records.read_record import Record
from ..records.state_timeline import Ints, Timeline, Window, build_timeline
from . import losses as lost
from .losses import Loss, StepRanges
from .pop import busy_ns, check_identities, efficiencies
from .window_steps import Floats, steps_in_window

# Replay the run on an ideal network, in which every transfer takes no time.
#
# The computing between communications, the points where collectives are launched and waited for,
# and the offsets at the window's start are kept; waits are recomputed. What is still longer than
# the longest rank's own time is serialisation: ranks that wait for each other alternately.

MAX_SMALL_GROUP = 16  # mean launches per node, up to which scalars are faster than arrays


def ideal_length(matched: MatchedCommunication, timelines: list[Timeline], within: Window) -> int:
    """Return T_id: the window's length in ns with every transfer = 0.

    With B(t) a rank's time outside communication up to t and D its delay so far, a launch
    happens at B + D, and a wait for a launch at M raises D to M - B where that is more.
    """
    busy = np.array([int(t.cumulative_busy([within.end])[0]) for t in timelines])
    waits, launches = matched.waits, matched.launches
    inside = (waits["end"] > within.start) & (waits["start"] < within.end)
    rank_of, end, node_of = (waits[name][inside] for name in ("record", "end", "node"))
    if not len(end):
        return int(busy.max())
    in_time = np.lexsort((end, rank_of))
    end, node_of = end[in_time], node_of[in_time]
    ranks = len(timelines)
    count = np.bincount(rank_of, minlength=ranks)
    base = np.concatenate(([0], np.cumsum(count)[:-1]))  # of each rank's waits
    slots = base + np.arange(ranks)  # of its delays: one more than waits
    before = np.zeros(len(end), np.int64)  # B at each wait
    at_launch = np.zeros(len(launches), np.int64)  # B at each launch
    waits_before = np.zeros(len(launches), np.int64)
    counts = np.bincount(launches["record"], minlength=ranks)
    first = np.concatenate(([0], np.cumsum(counts)))  # of each rank's launches
    for rank, line in enumerate(timelines):
        waits_of_rank = slice(base[rank], base[rank] + count[rank])
        before[waits_of_rank] = line.cumulative_busy(end[waits_of_rank])
        launches_of_rank = slice(first[rank], first[rank + 1])
        start = np.maximum(launches["start"][launches_of_rank], within.start)
        at_launch[launches_of_rank] = line.cumulative_busy(start)
        waits_before[launches_of_rank] = np.searchsorted(end[waits_of_rank], start, "right")
    delays = _delays(matched, node_of, before, at_launch, waits_before, base, slots, count)
    return int((busy + delays).max())


def _delays(
    matched: MatchedCommunication,
    node_of: Ints,
    before: Ints,
    at_launch: Ints,
    waits_before: Ints,
    base: Ints,
    slots: Ints,
    count: Ints,
) -> Ints:
    """Return every rank's delay at the end of the window (ns).

    Nodes are processed in the order of their last launch: all waits that precede a launch are for
    nodes that were complete before it.
    """
    rows, order, owner = matched.node_rows, matched.node_launches, matched.launches["record"]
    used = np.unique(node_of[node_of >= 0])
    last = np.maximum.reduceat(matched.launches["start"][order], rows[:-1])[used]
    never = np.iinfo(np.int64).min // 2
    complete = np.full(len(rows), never)  # when each node is, in the replay; the last: no node
    delay = np.zeros(len(node_of) + len(count), np.int64)
    done = np.zeros(len(count), np.int64)  # waits gone through, of each rank

    def advance(who: Ints, goal: Ints) -> None:
        while True:
            behind = done[who] < goal
            if not behind.any():
                return
            who, goal = who[behind], goal[behind]
            at = base[who] + done[who]
            slot = slots[who] + done[who]
            lifted = complete[node_of[at]] - before[at]
            delay[slot + 1] = np.maximum(delay[slot], lifted)
            done[who] += 1

    in_turn = used[np.argsort(last, kind="stable")]
    if len(order) < MAX_SMALL_GROUP * len(rows):
        return _delays_one_by_one(
            matched, node_of, before, at_launch, waits_before, base, count, in_turn
        )
    for node in in_turn.tolist():
        launch = order[rows[node] : rows[node + 1]]
        rank, goal = owner[launch], waits_before[launch]
        advance(rank, goal)
        complete[node] = (at_launch[launch] + delay[slots[rank] + goal]).max()
    all_ranks = np.arange(len(count))
    advance(all_ranks, count)
    return np.asarray(delay[slots + count], np.int64)


def _delays_one_by_one(
    matched: MatchedCommunication,
    node_of: Ints,
    before: Ints,
    at_launch: Ints,
    waits_before: Ints,
    base: Ints,
    count: Ints,
    in_turn: Ints,
) -> Ints:
    """Return the same delays as ``_delays``, computed with scalars."""
    rows, order = matched.node_rows.data, matched.node_launches
    owner = matched.launches["record"][order].data
    goals, launched = waits_before[order].data, at_launch[order].data
    nodes, at_wait = node_of.data, before.data
    first, done = base.tolist(), [0] * len(base)
    complete = [np.iinfo(np.int64).min // 2] * len(rows)
    delay = np.zeros(len(before) + len(base), np.int64).data

    def advance(who: int, goal: int) -> int:
        start = first[who]
        if done[who] < goal:
            late = delay[start + who + done[who]]
            for at in range(start + done[who], start + goal):
                late = max(late, complete[nodes[at]] - at_wait[at])
                delay[at + who + 1] = late
            done[who] = goal
        return int(delay[start + who + goal])

    for node in in_turn.tolist():
        complete[node] = max(
            launched[i] + advance(owner[i], goals[i]) for i in range(rows[node], rows[node + 1])
        )
    return np.array([advance(who, goal) for who, goal in enumerate(count.tolist())], np.int64)


MAX_REPLAY_NS = 1 << 62  # of all ranks' time together: delays in the replay may add up to it


class MeasuredWindow:
    """States, efficiencies and losses in the measured window, and how reliable they are.

    Attributes:
        matched: The communication; without last arrivals where they are unknown.
        timelines: In the order of ``records``, whose times are on one clock.
        steps: The steps that all ranks completed; None where they have none in common.
        blocked: Exposed time of each row of ``matched.waits``.
        clocks_unaligned: Whether some clocks could not be aligned: the last arrival is not known.
        replay_contradicts: Whether the replay on an ideal network takes longer than the clocks
            allow.
        residual_ns: Error of the aligned clocks (ns).
    """

    def __init__(
        self, records: list[Record], matched: MatchedCommunication, clocks: Clocks, within: Window
    ) -> None:
        self.clocks = clocks
        self.clocks_unaligned = bool(clocks.unaligned)
        if self.clocks_unaligned:
            matched = _without_arrivals(matched)
        self.records, self.matched, self.within = records, matched, within
        self.timelines: list[Timeline] = [
            build_timeline(record, latest, within)
            for record, latest in zip(records, matched.latest_arrivals(len(records)), strict=True)
        ]
        self.blocked = assign_blocked_time(matched, self.timelines)
        self.states = [line.states for line in self.timelines]
        self.residual_ns = clocks.residual_ns
        ideal, self.replay_contradicts = None, False
        if (
            len(records) > 1
            and not self.clocks_unaligned
            and sum(map(busy_ns, self.states)) < MAX_REPLAY_NS
        ):
            ideal = ideal_length(matched, self.timelines, within)
            assert ideal >= max(map(busy_ns, self.states)), "T_id is below the longest rank's time"
            # Each wait may be off by the clocks' residual; more is not the clocks.
            allowed = self.residual_ns * int(
                np.bincount(matched.waits["record"], minlength=1).max()
            )
            self.replay_contradicts = ideal > within.length + allowed
            ideal = None if self.replay_contradicts else min(ideal, within.length)
        self.efficiencies = efficiencies(self.states, within.length, ideal)
        check_identities(self.efficiencies)
        self.ranges: StepRanges = lost.split_into_ranges(records, within)
        self.steps = steps_in_window(records, within)
        self.losses = self._losses()

    def _losses(self) -> list[Loss]:
        place = lost.LossPlaces(self.records, self.matched, self.ranges, self.steps)
        found = lost.own_losses(self.records, self.timelines, place)
        found += lost.wait_losses(
            self.records,
            self.timelines,
            self.matched,
            self.blocked,
            self.within,
            place,
            self.residual_ns,
        )
        found += lost.transfer_losses(self.matched, self.blocked, len(self.records), place)
        return sorted(found, key=lambda loss: -loss.share)


def _without_arrivals(matched: MatchedCommunication) -> MatchedCommunication:
    """Return the communication with all blocked time as transfer: nothing says who came last."""
    waits = matched.waits.copy()
    waits["latest"], waits["culprit"] = waits["start"], NO_INDEX
    return replace(matched, waits=waits)


# Who waited for whom: every wait is attributed to the rank that arrived last

MAX_LISTED_PAIRS = 100


@dataclass(frozen=True)
class WaitPair:
    """The share of its time during which one rank waited for another one."""

    rank: int
    waited_for: int
    share: float


def wait_matrix(m: MeasuredWindow) -> Floats:
    """Return the share of the window in which record i waited for record j, as [i, j].

    Waits that are not longer than the clocks' residual are left out, as in the losses.
    """
    count = len(m.records)
    rows = m.matched.waits
    known = lost.attributed_waits(m.matched, m.blocked, m.within, m.residual_ns)
    pair = rows["record"][known].astype(np.int64) * count + rows["culprit"][known]
    time = np.bincount(pair, m.blocked.wait[known], minlength=count * count)
    return np.asarray(time.reshape(count, count) / m.within.length, np.float64)


def longest_waits(m: MeasuredWindow, most: int = MAX_LISTED_PAIRS) -> list[WaitPair]:
    """Return the pairs with the longest waits; empty where the last arrival is unknown."""
    if m.clocks_unaligned:
        return []
    shares = wait_matrix(m)
    order = np.argsort(-shares, axis=None, kind="stable")[:most]
    found = (np.unravel_index(int(at), shares.shape) for at in order)
    ranks = [record.rank for record in m.records]
    return [WaitPair(ranks[i], ranks[j], float(shares[i, j])) for i, j in found if shares[i, j] > 0]
