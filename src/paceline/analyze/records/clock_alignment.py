"""Align the clocks of all hosts, using the bounds that communication gives.

No rank can leave a collective before the last one has entered it. For hosts A and B with offsets
a and b to a common clock that means: end on A + a >= start on B + b, for every collective (or
message) in which a rank on A needs a rank on B. Offsets drift, so for each host a line
a(t) = offset + drift x t is fitted between the bounds, as far from them as possible.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...record.ring.header_schema import MAX_TIME_NS
from .match_collectives import MatchedCommunication, sends_only
from .read_record import Record
from .state_timeline import Ints

MAX_BOUNDS = 1 << 25  # collectives x clocks used for the alignment, 16 bytes each
_NEVER_STARTED, _NEVER_ENDED = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_MAX_DRIFT = 1e-3  # real clocks drift far less
_SEARCH_ITERATIONS = 80


@dataclass(frozen=True)
class Clock:
    """One host's clock: common time = local + offset + drift x (local - at)."""

    name: str
    hosts: tuple[str, ...]
    offset_ns: int
    drift: float
    at_ns: int
    residual_ns: int  # largest error of the offset that the bounds allow

    def to_common(self, local: Ints) -> Ints:
        drifted = np.rint(self.drift * (local - self.at_ns)).astype(np.int64)
        return np.asarray(local + self.offset_ns + drifted, np.int64)


@dataclass(frozen=True)
class Clocks:
    """The clocks of all hosts.

    Attributes:
        clocks: The first is the reference.
        unaligned: Names of the clocks that no communication ties to the reference: not aligned.
    """

    clocks: tuple[Clock, ...]
    unaligned: tuple[str, ...]

    @property
    def residual_ns(self) -> int:
        return max(clock.residual_ns for clock in self.clocks)


def align_clocks(
    records: list[Record], matched: MatchedCommunication
) -> tuple[list[Record], Clocks]:
    """Return the records with all times on the first record's clock, and the fitted clocks."""
    names = [str(r.meta.get("clock") or r.meta["host"]) for r in records]
    unique = list(dict.fromkeys(names))
    index = {name: i for i, name in enumerate(unique)}
    hosts_of: dict[str, set[str]] = {name: set() for name in unique}
    for record, name in zip(records, names, strict=True):
        hosts_of[name].add(record.host)
    hosts = {name: tuple(sorted(names_of_hosts)) for name, names_of_hosts in hosts_of.items()}
    first = unique[0]
    fitted = {first: Clock(first, hosts[first], 0, 0.0, 0, 0)}
    if len(unique) == 1:
        return records, Clocks((fitted[first],), ())
    bounds = _OffsetBounds(matched, np.array([index[name] for name in names]), len(unique))
    unaligned, newly_aligned = list[str](), first
    # number of bounds, to which aligned clock
    bounds_to_aligned = dict.fromkeys(unique[1:], (0, ""))
    while bounds_to_aligned:  # next is the host that has most bounds to an aligned one
        for name in bounds_to_aligned:
            u, k = index[name], index[newly_aligned]
            bounds_to_aligned[name] = max(
                bounds_to_aligned[name],
                (min(bounds.count(u, k), bounds.count(k, u)), newly_aligned),
            )
        count, name, reference = max(
            (n, name, other) for name, (n, other) in bounds_to_aligned.items()
        )
        if count == 0:
            break
        del bounds_to_aligned[name]
        u, k = index[name], index[reference]
        clock = _fit_clock(bounds.between(u, k), bounds.between(k, u), fitted[reference])
        if abs(clock.offset_ns) < MAX_TIME_NS:
            fitted[name], newly_aligned = replace(clock, name=name, hosts=hosts[name]), name
        else:  # no host has been up for that long
            unaligned.append(name)
    unaligned += bounds_to_aligned
    for name in unaligned:
        fitted[name] = Clock(name, hosts[name], 0, 0.0, 0, 0)
    aligned = [_on_common_clock(r, fitted[name]) for r, name in zip(records, names, strict=True)]
    return aligned, Clocks(tuple(fitted[name] for name in unique), tuple(unaligned))


def _on_common_clock(record: Record, clock: Clock) -> Record:
    if clock.offset_ns == 0 and clock.drift == 0.0:
        return record
    events = record.events.copy()
    for name in ("start", "end"):
        events[name] = clock.to_common(events[name])
    meta = dict(record.meta)
    for name in ("started_ns", "joined_ns"):
        if name in meta:
            meta[name] = int(clock.to_common(np.array([meta[name]]))[0])
    profile = record.profile
    if profile is not None:
        profile = replace(profile, at=clock.to_common(profile.at))
    return replace(record, events=events, meta=meta, profile=profile)


class _OffsetBounds:
    """The bounds between each pair of clocks, computed on demand."""

    def __init__(self, matched: MatchedCommunication, clock: Ints, count: int) -> None:
        """Prepare the bounds. clock: the index of each record's clock, of ``count`` clocks."""
        launches, waits = matched.launches, matched.waits
        nodes = len(matched.node_rows) - 1
        every = nodes * count // MAX_BOUNDS + 1  # take every n-th node where there are more
        nodes = nodes // every + 1
        # latest start of each node, per clock
        self._last_start = np.full((count, nodes), _NEVER_STARTED)
        node_of_launch = np.repeat(
            np.arange(len(matched.node_rows) - 1), np.diff(matched.node_rows)
        )
        launch = matched.node_launches[node_of_launch % every == 0]
        node_of_launch = node_of_launch[node_of_launch % every == 0] // every
        clock_and_node = (clock[launches["record"][launch]], node_of_launch)
        np.maximum.at(self._last_start, clock_and_node, launches["start"][launch])
        self._first_end = np.full((count, nodes), _NEVER_ENDED)  # first end of a wait for it
        waits = waits[(waits["node"] >= 0) & (waits["node"] % every == 0) & ~sends_only(waits)]
        clock_and_node = (clock[waits["record"]], waits["node"] // every)
        np.minimum.at(self._first_end, clock_and_node, waits["end"])

    def _is_bounded(self, a: int, b: int) -> npt.NDArray[np.bool_]:
        return np.asarray(
            (self._first_end[a] != _NEVER_ENDED) & (self._last_start[b] != _NEVER_STARTED)
        )

    def count(self, a: int, b: int) -> int:
        """Return the number of bounds of clock ``a`` against clock ``b``."""
        return int(np.count_nonzero(self._is_bounded(a, b)))

    def between(self, a: int, b: int) -> tuple[Ints, Ints]:
        """Return the bounds of clock ``a`` against clock ``b``: end times on ``a``, start times on
        ``b``.

        For each node: when the first wait on ``a`` for a launch on ``b`` ended, and when the last
        launch of that node on ``b`` had started.
        """
        bounded = self._is_bounded(a, b)
        return self._first_end[a][bounded], self._last_start[b][bounded]


def _fit_clock(after: tuple[Ints, Ints], before: tuple[Ints, Ints], reference: Clock) -> Clock:
    """Fit a host's clock to a reference clock that is already aligned.

    after: ends on the host, starts on the reference: end + a >= start, so a >= start - end.
    before: ends on the reference, starts on the host: a <= end - start.
    """
    lower_at, lower = after[0], reference.to_common(after[1]) - after[0]
    upper_at, upper = before[1], reference.to_common(before[0]) - before[1]
    at = int(np.median(np.concatenate([lower_at, upper_at])))
    base = int(np.median(upper))
    low_t, up_t = (lower_at - at).astype(np.float64), (upper_at - at).astype(np.float64)
    low, up = (lower - base).astype(np.float64), (upper - base).astype(np.float64)

    def half_width(drift: float) -> tuple[float, float]:
        """Return half the distance between the bounds for lines of this drift, and their middle."""
        lowest, highest = float(np.max(low - drift * low_t)), float(np.min(up - drift * up_t))
        return (highest - lowest) / 2, (highest + lowest) / 2

    # the half-width is a concave function of the drift
    low_drift, high_drift = -_MAX_DRIFT, _MAX_DRIFT
    for _ in range(_SEARCH_ITERATIONS):
        third = (high_drift - low_drift) / 3
        if half_width(low_drift + third)[0] < half_width(high_drift - third)[0]:
            low_drift += third
        else:
            high_drift -= third
    drift = (low_drift + high_drift) / 2
    half_width_ns, offset = half_width(drift)
    span = float(np.ptp(up_t)) if len(up_t) > 1 else 0.0
    if span < 1e9:  # a drift can't be determined from less than a second
        half_width_ns, offset = half_width(0.0)
        drift = 0.0
    residual = int(abs(half_width_ns)) + reference.residual_ns
    return Clock("", (), base + int(offset), drift, at, max(residual, 1))
