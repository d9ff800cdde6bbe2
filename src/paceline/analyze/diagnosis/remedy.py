"""A remedy of a cause of lost time, as it is proposed to the user."""

from dataclasses import dataclass
from typing import Any

from .rungs import Interval


@dataclass(frozen=True)
class Remedy:
    """Change of one knob, proposed for a cause.

    Attributes:
        knob: Name of the knob.
        cause: Identifier of the cause.
        value: Proposed value.
        gain: Predicted gain, as a share of the throughput; None if it must be measured.
        source: Source of the prediction.
        settable: Whether Paceline can set the knob; otherwise the script must be edited.
        edit: Description of the edit.
        line: Line of the script to edit, if it was found.
        code: Content of that line.
        numbers: Whether results change by more than the order of sums does.
        costs: Other possible costs.
    """

    knob: str
    cause: str
    value: Any
    gain: Interval | None
    source: str
    settable: bool
    edit: str
    line: int | None = None
    code: str = ""
    numbers: bool = False
    costs: str = ""
