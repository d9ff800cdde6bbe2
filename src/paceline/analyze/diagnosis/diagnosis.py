"""The result of ``paceline diagnose``."""

from dataclasses import dataclass, field

from ..figures.report import Report
from ..figures.step_work import Roofline
from .causes import Cause
from .confirmation import Witness
from .ladder_results import Ladder
from .line_profile import LineProfile
from .operator_profile import OperatorProfile
from .remedy import PredictionError, Remedy, TrialResults
from .rungs import Waterfall


@dataclass(frozen=True)
class Diagnosis:
    """Result of ``paceline diagnose``.

    Attributes:
        command: The script and its arguments.
        ladder: The measured rungs.
        report: Report of the measured steps of the last run in which nothing is switched off.
        waterfall: None if a rung that it needs could not be run; ``notes`` contain the reason.
        witnesses: Shares of a step's time according to experiment and record.
        causes: Causes of lost time, the largest first.
        notes: Remarks for the user.
        roofline: The script's computation compared with the limits of its machine; None without a
            machine file.
        remedies: Proposed remedies.
        tried: Remedies that ``--try`` measured, or None.
        after: Diagnosis with all remedies that were kept; None if none was kept.
        lines: Time by line of the script; None if nothing was sampled.
        usual: Losses that any training on several ranks has, too small to be causes.
        unconfirmed: Expected causes that no experiment confirms.
        off: Error of earlier predictions, by kind of prediction.
        options: Options of ``paceline diagnose`` that choose the ranks and how they run.
        operators: What a step computes, by line and operator; None if it could not be profiled.
        minutes: Time budget.
    """

    command: list[str]
    ladder: Ladder
    report: Report
    waterfall: Waterfall | None = None
    witnesses: list[Witness] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    roofline: Roofline | None = None
    remedies: list[Remedy] = field(default_factory=list)
    tried: TrialResults | None = None
    after: "Diagnosis | None" = None
    lines: LineProfile | None = None
    usual: list[Cause] = field(default_factory=list)
    unconfirmed: list[Cause] = field(default_factory=list)
    off: dict[str, PredictionError] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)
    operators: OperatorProfile | None = None
    minutes: float = 0.0
