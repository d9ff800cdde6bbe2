"""One clock for all hosts, from the bounds that communication gives.

Nobody can leave a collective before the last one has entered it. For hosts A and B with offsets
a and b to a common clock that says: end on A + a >= start on B + b, for every collective (or
message) in which someone on A needs someone on B. Offsets drift, so for each host a line
a(t) = offset + drift x t is fitted between the bounds, as far from them as possible.
"""

from dataclasses import dataclass, replace

import numpy as np

from .match import Matched, gives
from .read import Record
from .states import Ints

_DRIFT = 1e-3  # clocks of computers drift by less, by far
_TURNS = 80


@dataclass(frozen=True)
class Clock:
    """One host's clock against the common one: common = local + offset + drift x (local - at)."""

    name: str
    hosts: tuple[str, ...]
    offset_ns: int
    drift: float
    at_ns: int
    residual_ns: int  # how far the offset may be off, by the bounds

    def common(self, local: Ints) -> Ints:
        drifted = np.rint(self.drift * (local - self.at_ns)).astype(np.int64)
        return np.asarray(local + self.offset_ns + drifted, np.int64)


@dataclass(frozen=True)
class Clocks:
    """The clocks of all hosts; ``apart``: those that no communication ties to the first."""

    clocks: tuple[Clock, ...]
    apart: tuple[str, ...]

    @property
    def residual_ns(self) -> int:
        return max(clock.residual_ns for clock in self.clocks)


def names_of(records: list[Record]) -> list[str]:
    """Each record's clock, by name."""
    return [str(r.meta.get("clock") or r.meta["host"]) for r in records]


def align(records: list[Record], matched: Matched) -> tuple[list[Record], Clocks]:
    """The records with all times on the first record's clock, and how well that went."""
    names = names_of(records)
    unique = list(dict.fromkeys(names))
    hosts = {
        name: tuple(
            sorted({r.meta["host"] for r, n in zip(records, names, strict=True) if n == name})
        )
        for name in unique
    }
    first = unique[0]
    found = {first: Clock(first, hosts[first], 0, 0.0, 0, 0)}
    if len(unique) == 1:
        return records, Clocks((found[first],), ())
    bounds = _bounds(matched, np.array([unique.index(name) for name in names]), len(unique))
    waiting = unique[1:]
    while waiting:  # the host that communicates most with one that is known already comes next
        count, name, known = max(
            (min(len(bounds[u, k][0]), len(bounds[k, u][0])), name, reference)
            for name in waiting
            for reference in found
            for u, k in [(unique.index(name), unique.index(reference))]
        )
        if count == 0:
            break
        u, k = unique.index(name), unique.index(known)
        fitted = _fit(bounds[u, k], bounds[k, u], found[known])
        found[name] = replace(fitted, name=name, hosts=hosts[name])
        waiting.remove(name)
    for name in waiting:
        found[name] = Clock(name, hosts[name], 0, 0.0, 0, 0)
    moved = [_moved(r, found[name]) for r, name in zip(records, names, strict=True)]
    return moved, Clocks(tuple(found[name] for name in unique), tuple(waiting))


def _moved(record: Record, clock: Clock) -> Record:
    if clock.offset_ns == 0 and clock.drift == 0.0:
        return record
    events = record.events.copy()
    for name in ("start", "end"):
        events[name] = clock.common(events[name])
    meta = dict(record.meta)
    for name in ("started_ns", "joined_ns"):
        if name in meta:
            meta[name] = int(clock.common(np.array([meta[name]]))[0])
    return replace(record, events=events, meta=meta)


def _bounds(matched: Matched, clock: Ints, count: int) -> dict[tuple[int, int], tuple[Ints, Ints]]:
    """For each pair of clocks (A, B): times on A at which somebody there was done with what
    needed somebody on B, and the times on B at which the last of those there had started (of
    all parts of one collective or message: its node)."""
    launches, waits = matched.launches, matched.waits
    nodes = len(matched.node_rows) - 1
    never = np.iinfo(np.int64).min
    started = np.full((count, nodes), never)  # the latest start on each clock, of each node
    rows = np.repeat(np.arange(nodes), np.diff(matched.node_rows))
    launch = matched.node_launches
    np.maximum.at(started, (clock[launches["record"][launch]], rows), launches["start"][launch])
    done = np.full((count, nodes), np.iinfo(np.int64).max)  # the first end of a wait for it
    real = (waits["node"] >= 0) & ~gives(waits)
    np.minimum.at(done, (clock[waits["record"][real]], waits["node"][real]), waits["end"][real])
    result = {}
    for a in range(count):
        for b in range(count):
            if a != b:
                both = (done[a] != np.iinfo(np.int64).max) & (started[b] != never)
                result[a, b] = (done[a][both], started[b][both])
    return result


def _fit(after: tuple[Ints, Ints], before: tuple[Ints, Ints], reference: Clock) -> Clock:
    """The line for a host's clock against a known one.

    after: ends on the host, starts on the reference: end + a >= start, so a >= start - end.
    before: ends on the reference, starts on the host: a <= end - start.
    """
    lower_at, lower = after[0], reference.common(after[1]) - after[0]
    upper_at, upper = before[1], reference.common(before[0]) - before[1]
    at = int(np.median(np.concatenate([lower_at, upper_at])))
    base = int(np.median(upper))
    low_t, up_t = (lower_at - at).astype(np.float64), (upper_at - at).astype(np.float64)
    low, up = (lower - base).astype(np.float64), (upper - base).astype(np.float64)

    def slack(drift: float) -> tuple[float, float]:
        """Half the room between the bounds for lines of this drift, and the middle."""
        least, most = float(np.max(low - drift * low_t)), float(np.min(up - drift * up_t))
        return (most - least) / 2, (most + least) / 2

    left, right = -_DRIFT, _DRIFT  # the room is a concave function of the drift
    for _ in range(_TURNS):
        third = (right - left) / 3
        if slack(left + third)[0] < slack(right - third)[0]:
            left += third
        else:
            right -= third
    drift = (left + right) / 2
    room, offset = slack(drift)
    span = float(np.ptp(up_t)) if len(up_t) > 1 else 0.0
    if span < 1e9:  # under a second a drift can't be told from chance
        room, offset = slack(0.0)
        drift = 0.0
    residual = int(abs(room)) + reference.residual_ns
    return Clock("", (), base + int(offset), drift, at, max(residual, 1))
