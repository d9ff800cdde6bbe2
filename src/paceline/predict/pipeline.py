"""Predict the savings of remedies for the bubble of a pipeline, by its formula."""

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.evidence import Evidence
from ..analyze.diagnosis.ladder import Interval
from ..analyze.figures.pipeline import PipelineFigures
from ..cost.pipeline import idle_share
from .saving import FORMULA, RECORD, Saving

DATA = "data"  # axis of the mesh whose ranks train different samples
TENSOR = "tensor"
ZERO_BUBBLE = "zero-bubble"


def _figures(cause: Cause) -> PipelineFigures | None:
    """Return the figures of the pipeline, which are the evidence of its cause."""
    return PipelineFigures(**cause.evidence) if "stage_s" in cause.evidence else None


def _saving(cause: Cause, value: str | int, part: float, source: str) -> Saving:
    """Return a saving of a part of the bubble, which is at most all of it."""
    low, high = cause.interval
    part = min(max(part, 0.0), 1.0)
    return Saving(value, Interval(part * cause.share, part * low, part * high), source)


def more_micro_batches(e: Evidence, cause: Cause) -> Saving | None:
    """Propose twice as many micro-batches, if a batch has as many samples."""
    one = _figures(cause)
    if one is None or not e.report.samples:
        return None
    count = 2 * one.micro_batches
    data_ranks = {place.get(DATA, 0) for place in e.report.mesh.values()}
    if e.report.samples / e.steps / max(len(data_ranks), 1) < count:
        return None
    less = one.formula - idle_share(one.schedule, one.stages, count)
    return _saving(cause, count, less / one.bubble, FORMULA)


def other_schedule(e: Evidence, cause: Cause) -> Saving | None:
    """Propose zero-bubble in place of schedules with a longer bubble; not with a tensor axis."""
    if any(TENSOR in place for place in e.report.mesh.values()):
        return None  # layouts with both are refused
    one = _figures(cause)
    if one is None:
        return Saving(ZERO_BUBBLE, Interval(cause.share / 2, 0.0, cause.share), FORMULA)
    if one.schedule == ZERO_BUBBLE:
        return None
    less = one.formula - idle_share(ZERO_BUBBLE, one.stages, one.micro_batches)
    return _saving(cause, ZERO_BUBBLE, less / one.bubble, FORMULA) if less > 0 else None


def other_balance(e: Evidence, cause: Cause) -> Saving | None:
    """Propose the division in which the longest stage is shorter, if the run has measured one."""
    one = _figures(cause)
    if one is None or not one.balance:
        return None
    longest, mean = max(one.stage_s), sum(one.stage_s) / len(one.stage_s)
    wait = 1 - mean / longest  # of the stages' time, because of their differences
    return _saving(cause, ", ".join(one.balance), min(wait / one.bubble, 1.0) / 2, RECORD)
