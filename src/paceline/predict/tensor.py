"""Predict the savings of remedies for the exchange of a tensor axis."""

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.evidence import Evidence
from ..analyze.diagnosis.ladder import Interval
from .saving import FORMULA, TRIED, Saving


def smaller_axis(e: Evidence, cause: Cause) -> Saving | None:
    """Predict the saving with the next smaller number of ranks on the tensor axis.

    The bytes that cross a link are those of an all-reduce: 2 (p - 1) / p of the tensor. An axis on
    several nodes gets the ranks of one node.
    """
    extent, hosts = int(cause.evidence.get("extent", 2)), int(cause.evidence.get("hosts", 1))
    if hosts > 1 and extent % hosts == 0:
        fewer = extent // hosts
    else:
        fewer = max(n for n in range(1, extent) if extent % n == 0)
    axis = f"tp{fewer}" if fewer > 1 else "without tp"
    more = f"{extent // fewer} times as many data ranks"
    edit = f"set a layout {axis} in place of tp{extent}, with {more}"
    part = 1 - ((fewer - 1) / fewer) / ((extent - 1) / extent)
    low, high = cause.interval
    # low: the all-reduces of gradients, between more data ranks, take what this one saves
    return Saving(edit, Interval(part * cause.share, min(0.0, part * low), part * high), FORMULA)


def split_sequence(e: Evidence, cause: Cause) -> Saving | None:
    """Propose parts of the sequence where ranks exchange by all-reduces."""
    if cause.evidence.get("collective") != "all-reduce":
        return None
    return Saving(True, None, TRIED)
