"""The result of ``paceline diagnose``, with the remedies of causes, as proposed and as tried."""

from dataclasses import dataclass, field
from typing import Any

from ..figures.report import Report
from ..figures.step_work import Roofline
from .causes import Cause
from .confirmation import Witness
from .ladder_results import Ladder
from .line_profile import LineProfile
from .operator_profile import OperatorProfile
from .rungs import Interval, Waterfall

# Probability that a remedy without an effect is kept, in all passes of trials.
FALSE_KEEP_LEVEL = 0.1
MAX_LOSS_INCREASE = 0.01  # of the loss, relative; accepted for a knob that changes numbers


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


@dataclass(frozen=True)
class Losses:
    """Training losses without and with a knob.

    Attributes:
        without: Mean loss without the knob.
        with_it: Mean loss over the same steps with the knob.
        spread: Largest minus smallest mean loss of the runs without the knob.
    """

    without: float
    with_it: float
    spread: float

    @property
    def worse(self) -> bool:
        """Whether the loss increases by more than ``spread`` and ``MAX_LOSS_INCREASE``."""
        return self.with_it - self.without > max(self.spread, MAX_LOSS_INCREASE * abs(self.without))


@dataclass(frozen=True)
class Trial:
    """Result of trying one remedy.

    Gains are shares of the throughput.

    Attributes:
        remedy: The remedy.
        predicted: Gain that was predicted before the trial, with all settings kept by then.
        gain: Measured gain; None if it could not be measured. The remedy is kept only if the
            interval is above zero: its ends allow for the number of looks and of remedies.
        kept: Whether the remedy helped and is kept.
        why: Reason why the remedy was not kept or not tried; may be empty.
        rounds: Number of measured rounds.
        loss: Training losses, for a knob that changes numbers.
        source: Source of ``predicted``.
        first: Original prediction, if a micro-measurement refined it.
        late: Whether there was no time left to try the remedy, or to measure enough of it.
    """

    remedy: Remedy
    predicted: Interval | None
    gain: Interval | None
    kept: bool
    why: str = ""
    rounds: int = 0
    loss: Losses | None = None
    source: str = ""
    first: Interval | None = None
    late: bool = False

    @property
    def off(self) -> float | None:
        """Measured minus predicted gain, as a share of the throughput."""
        if self.gain is None or self.predicted is None:
            return None
        return self.gain.mean - self.predicted.mean


@dataclass
class TrialResults:
    """Results of all trials.

    Attributes:
        trials: Trials in their order.
        kept: Values of the knobs that were kept.
        faster: Throughput with the kept knobs, relative to the throughput at the beginning: of
            ``confirmed``, else the product of the trials.
        confirmed: Gain of all kept remedies together, measured after the trials; None if none was
            kept, or there was no measurement.
        level_left: Probability of keeping a remedy without an effect that later passes may spend.
    """

    trials: list[Trial] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    faster: float = 1.0
    confirmed: Interval | None = None
    level_left: float = FALSE_KEEP_LEVEL

    @property
    def decided(self) -> set[str]:
        """Knobs that need no further trial: all that were tried, unless the time was over."""
        return {trial.remedy.knob for trial in self.trials if not trial.late}


@dataclass(frozen=True)
class PredictionError:
    """Prediction error of one kind of predictions.

    Attributes:
        points: Median absolute error in percentage points.
        count: Number of predictions.
    """

    points: float
    count: int


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
