"""Results of the analysis of a study, in the form in which outputs show them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...analyze.scaling.bends import MIN_SHOWN, Bend, GrownLoss, Proposal
from ...analyze.scaling.derived import Estimate, scaling, throughput
from ...analyze.scaling.forecast import (
    COST_MODEL,
    KindAnalysis,
    analyse_kind,
    next_sizes,
    placed_size_at,
)
from ...analyze.scaling.forecast import Knee as FoundKnee
from ...analyze.scaling.laws import AMDAHL, UNIVERSAL, Band, LawFit, Parameter
from ...analyze.scaling.study_model import Prediction, ScalingStudy
from ..numbers import counted, percent

MAX_KNOWN = 100.0  # of an interval's upper end to its value: beyond, there is no upper limit


# Remedies by kind of scaling, and by ranks of the larger size.
Proposals = Mapping[str, Mapping[int, Sequence[Proposal]]]
MAX_TOLD = 3  # losses of a step from size to size
POINTS_PER_DOUBLING = 4  # of a curve


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
    parameters: list[Parameter] = field(default_factory=list)
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
        predicted = self.prediction
        return predicted.high if predicted.high <= MAX_KNOWN * predicted.throughput else None

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
            [fit for fit in self.fits if fit.kind == kind],
            [curve for curve in self.curves if curve.kind == kind],
            [knee for knee in self.knees if knee.kind == kind],
            [reason for reason in self.reasons if reason.kind == kind],
            [checked for checked in self.predictions if checked.prediction.kind == kind],
        )


def findings_of(study: ScalingStudy, proposals: Proposals | None = None) -> Findings:
    """Analyse a study; sizes that are too few leave parts of the result empty.

    Args:
        proposals: Remedies of ``predict.remedies``; None: none are told.
    """
    found = Findings()
    has_cost_model = False
    for kind in study.request.kinds:
        analysis = analyse_kind(study, kind)
        if analysis is None or len(analysis.costs) < 2:
            continue
        found.fits.extend(_fits(analysis, has_cost_model))
        found.curves.extend(_curves(analysis))
        if analysis.knee is not None:
            found.knees.append(_knee(kind, analysis.knee))
        remedies = (proposals or {}).get(kind, {})
        shown = {scaled.point.ranks: scaled.efficiency.value for scaled in scaling(study, kind)}
        found.reasons.extend(
            _reason(bend, shown, remedies.get(bend.larger, ())) for bend in analysis.bends
        )
        has_cost_model = True
    found.predictions.extend(_checked(study, prediction) for prediction in study.predictions)
    return found


def _fits(analysis: KindAnalysis, has_cost_model: bool) -> list[Fit]:
    """Return the fits of one kind; the cost model's parameters are those of all kinds together."""
    found = [_fit(analysis, law.law, list(law.parameters), _limit(law)) for law in analysis.laws]
    parameters = [] if has_cost_model else list(analysis.model.parameters())
    return [*found, _fit(analysis, COST_MODEL, parameters)]


def _limit(law: LawFit) -> str:
    """Return why a law does not describe the sizes, or ""."""
    serial = {parameter.value for parameter in law.parameters if parameter.name == "s"}
    beyond = law.law == AMDAHL and max(serial, default=0.0) > 1
    return "s above 1: more ranks are slower, which this law does not describe" if beyond else ""


def _fit(analysis: KindAnalysis, model: str, parameters: list[Parameter], note: str = "") -> Fit:
    errors = [abs(size.error) for size in analysis.left_out if size.model == model]
    return Fit(
        analysis.kind,
        model,
        parameters,
        statistics.median(errors) if errors else None,
        max(errors) if errors else None,
        note,
    )


def _curves(analysis: KindAnalysis) -> list[Curve]:
    """Return the throughput by the cost model, and by the universal law, up to the next size."""
    sizes = [costs.ranks for costs in analysis.costs]
    ranks = _grid(sizes[0], next_sizes(sizes, 1)[0], sizes)
    bands = {COST_MODEL: [_modelled(analysis, n) for n in ranks]}
    for law in analysis.laws:
        if law.law == UNIVERSAL:
            bands[law.law] = [law.throughput(n) for n in ranks]
    return [
        Curve(
            analysis.kind,
            model,
            ranks,
            [band.value for band in found],
            [band.low for band in found],
            [band.high for band in found],
        )
        for model, found in bands.items()
        if all(0 < x < math.inf for band in found for x in (band.value, band.low, band.high))
    ]


def _modelled(analysis: KindAnalysis, ranks: int) -> Band:
    return analysis.model.throughput(placed_size_at(analysis.costs, analysis.kind, ranks))


def _grid(first: int, last: int, sizes: Sequence[int]) -> list[int]:
    count = max(math.ceil(POINTS_PER_DOUBLING * math.log2(last / first)), 1)
    found = {round(first * (last / first) ** (i / count)) for i in range(count + 1)}
    return sorted(found | set(sizes))


def _knee(kind: str, knee: FoundKnee) -> Knee:
    ranks = counted(knee.ranks, "rank")
    band = f" (95 % interval: {knee.low} to {knee.high})" if knee.low != knee.high else ""
    more = "at least " if knee.beyond else ""
    text = f"The efficiency is at least {knee.efficiency:g} up to {more}{ranks}{band}."
    return Knee(kind, text, float(knee.ranks), float(knee.low), float(knee.high))


def _reason(bend: Bend, shown: Mapping[int, float], proposals: Sequence[Proposal]) -> Reason:
    """Return a bend in words. shown: By ranks, the efficiencies that the table has."""
    sizes = f"From {bend.smaller} to {counted(bend.larger, 'rank')}"
    before, after = (shown.get(ranks, math.inf) for ranks in (bend.smaller, bend.larger))
    if not after < before < math.inf:  # medians of the runs; the bend's are means of all steps
        before, after = bend.before, bend.after
    change = f"the efficiency falls from {before:.2f} to {after:.2f}"
    if bend.main is None:
        text = f"{sizes}: {before:.2f} to {after:.2f}, no loss larger than the noise."
        return Reason(bend.kind, bend.smaller, bend.larger, text)
    largest = [loss for loss in bend.losses if loss.share >= MIN_SHOWN][:MAX_TOLD]
    causes = "; ".join(f"{loss.sentence} ({percent(loss.share)} of the loss)" for loss in largest)
    shorter = -sum(loss.share for loss in bend.losses if loss.share < 0)
    if shorter >= MIN_SHOWN:  # else shares above 100 % are not explained
        causes += f"; other parts of a step are shorter (-{percent(shorter)})"
    text = f"{sizes} {change}: {causes}."
    remedy = " ".join(filter(None, (_gain(bend.main), _remedies(proposals))))
    return Reason(bend.kind, bend.smaller, bend.larger, text, bend.main.share, remedy)


def _gain(loss: GrownLoss) -> str:
    if loss.gain <= 0:
        return ""
    return f"Without the first one, the throughput would be up to {percent(loss.gain)} higher."


def _remedies(proposals: Sequence[Proposal]) -> str:
    """Return what ``paceline diagnose`` would propose, with the predicted gain at that size."""
    remedies = []
    for proposal in proposals[:MAX_TOLD]:
        what = proposal.edit or proposal.knob
        gain = "gain not known"
        if proposal.gain is not None:
            gain = f"predicted: +{percent(proposal.gain)}"
        remedies.append(f"{what} ({gain}, at most +{percent(proposal.at_most)})")
    return f"Remedies: {'; '.join(remedies)}." if remedies else ""


def _checked(study: ScalingStudy, prediction: Prediction) -> CheckedPrediction:
    measured: Estimate | None = None
    for point in study.of_kind(prediction.kind):
        same = (point.ranks, point.setup.global_batch)
        if same == (prediction.ranks, prediction.global_batch) and prediction in point.predicted:
            measured = throughput(point)
    return CheckedPrediction(prediction, measured)
