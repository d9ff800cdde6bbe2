"""One clock for all hosts, from the bounds that communication gives.

Nobody can leave a collective before the last one has entered it. For hosts A and B with offsets
a and b to a common clock that says: end on A + a >= start on B + b, for every collective (or
message) in which someone on A needs someone on B. Offsets drift, so for each host a line
a(t) = offset + drift x t is fitted between the bounds, as far from them as possible.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...record.ring.header_schema import MAX_TIME_NS
from .match_collectives import Matched, gives
from .read_record import Record
from .state_timeline import Ints

MAX_BOUNDS = 1 << 25  # collectives times clocks that are looked at, 16 bytes each
_NEVER, _ALWAYS = np.iinfo(np.int64).min, np.iinfo(np.int64).max
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
    at = {name: i for i, name in enumerate(unique)}
    each: dict[str, set[str]] = {name: set() for name in unique}
    for record, name in zip(records, names, strict=True):
        each[name].add(record.host)
    hosts = {name: tuple(sorted(of)) for name, of in each.items()}
    first = unique[0]
    found = {first: Clock(first, hosts[first], 0, 0.0, 0, 0)}
    if len(unique) == 1:
        return records, Clocks((found[first],), ())
    bounds = _Bounds(matched, np.array([at[name] for name in names]), len(unique))
    apart, known = list[str](), first
    best = dict.fromkeys(unique[1:], (0, ""))  # bounds to the clock that has most in common
    while best:  # the host that communicates most with one that is known already comes next
        for name in best:
            u, k = at[name], at[known]
            best[name] = max(best[name], (min(bounds.count(u, k), bounds.count(k, u)), known))
        count, name, reference = max((n, name, other) for name, (n, other) in best.items())
        if count == 0:
            break
        del best[name]
        u, k = at[name], at[reference]
        fitted = _fit(bounds.of(u, k), bounds.of(k, u), found[reference])
        if abs(fitted.offset_ns) < MAX_TIME_NS:
            found[name], known = replace(fitted, name=name, hosts=hosts[name]), name
        else:  # no node has been up for so long
            apart.append(name)
    apart += best
    for name in apart:
        found[name] = Clock(name, hosts[name], 0, 0.0, 0, 0)
    moved = [_moved(r, found[name]) for r, name in zip(records, names, strict=True)]
    return moved, Clocks(tuple(found[name] for name in unique), tuple(apart))


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


class _Bounds:
    """What communication says of each pair of clocks, made when it is asked for."""

    def __init__(self, matched: Matched, clock: Ints, count: int) -> None:
        """clock: the number of each record's clock, of ``count``."""
        launches, waits = matched.launches, matched.waits
        nodes = len(matched.node_rows) - 1
        every = nodes * count // MAX_BOUNDS + 1  # of more nodes than that, every second and so on
        nodes = nodes // every + 1
        self._started = np.full((count, nodes), _NEVER)  # the latest start, of each node
        rows = np.repeat(np.arange(len(matched.node_rows) - 1), np.diff(matched.node_rows))
        launch = matched.node_launches[rows % every == 0]
        rows = rows[rows % every == 0] // every
        place = (clock[launches["record"][launch]], rows)
        np.maximum.at(self._started, place, launches["start"][launch])
        self._done = np.full((count, nodes), _ALWAYS)  # the first end of a wait for it
        waits = waits[(waits["node"] >= 0) & (waits["node"] % every == 0) & ~gives(waits)]
        place = (clock[waits["record"]], waits["node"] // every)
        np.minimum.at(self._done, place, waits["end"])

    def _both(self, a: int, b: int) -> npt.NDArray[np.bool_]:
        return np.asarray((self._done[a] != _ALWAYS) & (self._started[b] != _NEVER))

    def count(self, a: int, b: int) -> int:
        """Return how many bounds there are."""
        return int(np.count_nonzero(self._both(a, b)))

    def of(self, a: int, b: int) -> tuple[Ints, Ints]:
        """Return times on ``a`` at which somebody there was done with what needed somebody on
        ``b``, and the times on ``b`` at which the last of those there had started (of all parts of
        one collective or message: its node)."""
        both = self._both(a, b)
        return self._done[a][both], self._started[b][both]


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
