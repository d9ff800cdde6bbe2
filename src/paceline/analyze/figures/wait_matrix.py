"""Compute who waited for whom: every wait is attributed to the rank that arrived last."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .losses import attributed_waits
from .measured_window import MeasuredWindow

MAX_LISTED_PAIRS = 100


@dataclass(frozen=True)
class WaitPair:
    """``rank`` waited for ``waited_for`` during ``share`` of its time."""

    rank: int
    waited_for: int
    share: float


def wait_matrix(m: MeasuredWindow) -> npt.NDArray[np.float64]:
    """Return the share of the window in which record i waited for record j, as [i, j].

    Waits that are not longer than the clocks' residual are left out, as in the losses.
    """
    count = len(m.records)
    rows = m.matched.waits
    known = attributed_waits(m.matched, m.blocked, m.within, m.residual_ns)
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
