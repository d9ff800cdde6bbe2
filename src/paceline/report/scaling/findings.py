"""Results of the analysis of a study, in the form in which outputs show them."""

from dataclasses import dataclass, field

from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.study_model import Prediction

MAX_KNOWN = 100.0  # of an interval's upper end to its value: beyond, there is no upper limit


@dataclass(frozen=True)
class FittedParameter:
    """A parameter of a model and its interval; infinite ends are not known."""

    name: str
    value: float
    low: float
    high: float
    unit: str = ""
    meaning: str = ""


@dataclass(frozen=True)
class Fit:
    """A model that was fitted to the sizes of one kind.

    Attributes:
        kind: STRONG or WEAK.
        model: Name of the model.
        error: Leave-one-out error: median relative error of a size that the fit does not contain;
            None with fewer than four sizes.
        worst: The largest one.
        note: What else one must know.
    """

    kind: str
    model: str
    parameters: list[FittedParameter] = field(default_factory=list)
    error: float | None = None
    worst: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """The throughput that a model gives, in samples/s, with its band.

    Attributes:
        ranks: Numbers of ranks, ascending; they need not be measured sizes.
    """

    kind: str
    model: str
    ranks: list[int]
    values: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Reason:
    """Why the efficiency falls from one size to the next.

    Attributes:
        first, then: Numbers of ranks.
        text: One sentence, with the share.
        share: Share of the step of ``then`` that the named loss grew by; None if none grew.
        remedy: What diagnose would propose, and its gain; "".
    """

    kind: str
    first: int
    then: int
    text: str
    share: float | None = None
    remedy: str = ""


@dataclass(frozen=True)
class Knee:
    """The largest size above the wished efficiency.

    Attributes:
        text: In one sentence.
        ranks: Its number of ranks; None if no size is above.
        low, high: Its band; None where it is not known.
    """

    kind: str
    text: str
    ranks: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class CheckedPrediction:
    """A prediction that was stored, and the measurement of its size if there is one."""

    prediction: Prediction
    measured: Estimate | None

    @property
    def high(self) -> float | None:
        """Upper end of the prediction's interval; None if the fit gives none."""
        one = self.prediction
        return one.high if one.high <= MAX_KNOWN * one.throughput else None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        if self.measured is None:
            return None
        return self.prediction.throughput / self.measured.value - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the measurement lies in the prediction's interval."""
        if self.measured is None:
            return None
        return self.prediction.low <= self.measured.value <= self.prediction.high


@dataclass(frozen=True)
class Findings:
    """What the analysis found for all kinds; empty where sizes are too few."""

    fits: list[Fit] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    knees: list[Knee] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    predictions: list[CheckedPrediction] = field(default_factory=list)

    def of_kind(self, kind: str) -> "Findings":
        """Return the findings of one kind of scaling."""
        return Findings(
            [one for one in self.fits if one.kind == kind],
            [one for one in self.curves if one.kind == kind],
            [one for one in self.knees if one.kind == kind],
            [one for one in self.reasons if one.kind == kind],
            [one for one in self.predictions if one.prediction.kind == kind],
        )
