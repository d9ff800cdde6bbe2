"""The predicted saving of a knob."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.evidence import Evidence
from ..analyze.diagnosis.rungs import Interval
from ..knobs.knob import FORMULA as FORMULA
from ..knobs.knob import LADDER as LADDER
from ..knobs.knob import RECORD as RECORD

TRIED = "a few steps"  # a measurement of a few steps with the knob set


@dataclass(frozen=True)
class Saving:
    """Predicted saving of one knob.

    Attributes:
        value: Value of the knob.
        saves: Saved share of a step; None if it must be measured in a few steps.
        source: Kind of the prediction: LADDER, RECORD, FORMULA or TRIED; or a bound.
    """

    value: Any
    saves: Interval | None
    source: str


PredictSaving = Callable[[Evidence, Cause], Saving | None]


def scaled(cause: Cause, part: float, source: str, value: Any = True) -> Saving:
    """Return a saving of a part of the cause's share."""
    low, high = cause.interval
    return Saving(value, Interval(part * cause.share, part * low, part * high), source)
