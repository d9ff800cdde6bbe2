"""Find the lines with which a rank was busy while the other ranks waited for it.

A wait is booked to the rank that arrived last. What that rank does during the wait says less than
what it did more of than the waiting rank since both were last together: a rank that is late in its
own work already computes the backward when the others begin to wait.
"""

from collections import defaultdict

import numpy as np

from ..figures.losses import attributed_waits, last_together, rows_by_value
from ..figures.measured_window import MeasuredWindow
from ..records.rank_lines import RankLines, SampledLine
from .line_profile import LineProfile

MAX_WAITS = 4000  # of each late rank, the longest ones


def add_waits(profile: LineProfile, m: MeasuredWindow, weight: float) -> None:
    """Add the waits of a run to ``profile.waited``, times ``weight``."""
    if m.clocks_unaligned:
        return
    rows = m.matched.waits
    known = np.flatnonzero(attributed_waits(m.matched, m.blocked, m.within, m.residual_ns))
    start = np.clip(rows["start"], m.within.start, m.within.end)
    together = np.clip(last_together(rows), m.within.start, start)
    arrival = np.clip(np.minimum(rows["latest"], rows["end"]), start, m.within.end)
    whole = len(m.records) * m.within.length
    for culprit, of_culprit in rows_by_value(rows["culprit"][known]):
        waits = known[of_culprit]
        waits = waits[np.argsort(-m.blocked.wait[waits], kind="stable")][:MAX_WAITS]
        waited = float(m.blocked.wait[waits].sum()) / whole
        excess: dict[SampledLine, float] = defaultdict(float)
        for wait in waits.tolist():
            length = max(int(arrival[wait] - together[wait]), 1)
            scale = float(m.blocked.wait[wait]) / length
            late, waiting = m.records[culprit].profile, m.records[rows["record"][wait]].profile
            assert late is not None
            assert waiting is not None
            _add_lines(excess, late, int(together[wait]), int(arrival[wait]), scale)
            _add_lines(excess, waiting, int(together[wait]), int(start[wait]), -scale)
        positive = {line: value for line, value in excess.items() if value > 0}
        found = profile.waited.setdefault(m.records[culprit].rank, {})
        for line, value in positive.items():
            share = weight * waited * value / sum(positive.values())
            found[line] = found.get(line, 0.0) + share


def _add_lines(
    sums: dict[SampledLine, float], of: RankLines, start: int, end: int, scale: float
) -> None:
    """Add the time of the innermost lines between two times, times ``scale``."""
    first, last = np.searchsorted(of.at, [start, end], "right")
    for sample in range(int(first), int(last)):
        lines = of.stacks[int(of.stack[sample])].lines
        if lines:
            sums[of.lines[lines[0]]] += scale * float(of.weight[sample])
