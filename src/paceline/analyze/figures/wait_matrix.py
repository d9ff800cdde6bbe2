"""Who waited for whom: every wait's time, booked to the rank that arrived last."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..records.match_collectives import NO_INDEX
from .measured_window import Measured

MOST = 100  # pairs that are told one by one


@dataclass(frozen=True)
class Pair:
    """``rank`` waited for ``waited_for`` during ``share`` of its time."""

    rank: int
    waited_for: int
    share: float


def matrix(m: Measured) -> npt.NDArray[np.float64]:
    """[i, j]: the share of the window in which record i waited for record j. Waits that are not
    longer than the clocks' residual are nobody's, as in the losses."""
    count = len(m.records)
    rows = m.matched.waits
    start = np.clip(rows["start"], m.within.start, m.within.end)
    turn = np.clip(np.minimum(rows["latest"], rows["end"]), start, m.within.end)
    known = (rows["culprit"] != NO_INDEX) & (turn - start > m.residual)
    pair = rows["record"][known].astype(np.int64) * count + rows["culprit"][known]
    time = np.bincount(pair, (turn - start)[known], minlength=count * count)
    return np.asarray(time.reshape(count, count) / m.within.length, np.float64)


def pairs(m: Measured, most: int = MOST) -> list[Pair]:
    """Those who waited longest, and for whom; empty where nothing says who came last."""
    if m.apart:
        return []
    shares = matrix(m)
    order = np.argsort(-shares, axis=None, kind="stable")[:most]
    found = (np.unravel_index(int(at), shares.shape) for at in order)
    ranks = [record.rank for record in m.records]
    return [Pair(ranks[i], ranks[j], float(shares[i, j])) for i, j in found if shares[i, j] > 0]
