"""Predict sizes that were not measured: the next ones, the knee, and each size from the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .bends import Bend, find_bends
from .cost_model import CostModel, PlacedSize, fit_cost_model
from .costs import SizeCosts, costs_of_points, size_costs
from .laws import UNIVERSAL, Band, LawFit, fit_laws
from .study_model import STRONG, Prediction, ScalingStudy

COST_MODEL = "cost model"
MIN_LEFT_OUT_SIZES = 4  # from which on leave-one-out errors are computed
NEXT_SIZES = 2
MAX_KNEE_FACTOR = 64  # of the largest size, up to which the knee is searched
_GRID = 1.05  # ratio of two sizes among which the knee is searched


@dataclass(frozen=True)
class LeftOut:
    """A size that is predicted from the others.

    Attributes:
        error: (predicted - measured) / measured throughput.
    """

    ranks: int
    model: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Knee:
    """The largest size whose efficiency is at least a limit.

    Attributes:
        efficiency: The limit.
        ranks: The size; the smallest one if even that is not reached by the next.
        low, high: 95 % band.
        beyond: Whether the efficiency is still reached at ``ranks``, the largest size that the
            model may be asked for.
    """

    efficiency: float
    ranks: int
    low: int
    high: int
    beyond: bool = False


@dataclass(frozen=True)
class KindAnalysis:
    """What is known about one kind of scaling.

    Attributes:
        kind: STRONG or WEAK.
        costs: Parts of a step at the measured sizes, by ranks.
        model: The fitted cost model, of all measured sizes of both kinds.
        laws: The fitted scaling laws of this kind.
        bends: Why the efficiency falls from each size to the next.
        whole: Why it falls from the smallest size to the largest; None with a single size.
        knee: None with a single size.
        left_out: Predictions of each size from the others; empty with fewer than four sizes.
        notes: What could not be computed, and why.
    """

    kind: str
    costs: list[SizeCosts]
    model: CostModel
    laws: list[LawFit]
    bends: list[Bend]
    whole: Bend | None
    knee: Knee | None
    left_out: list[LeftOut]
    notes: list[str]


def analyse_kind(study: ScalingStudy, kind: str) -> KindAnalysis | None:
    """Return the analysis of one kind of scaling; None without a measured size."""
    costs = _costs_of_kind(study, kind)
    if not costs:
        return None
    every = costs_of_points(study.points)
    model = fit_cost_model(every)
    notes = []
    if len(costs) < MIN_LEFT_OUT_SIZES:
        notes.append(
            f"the error of the fit is unknown: leaving one of {len(costs)} sizes out leaves too "
            f"few. HINT: measure {MIN_LEFT_OUT_SIZES} sizes"
        )
    return KindAnalysis(
        kind,
        costs,
        model,
        fit_laws(costs, kind),
        find_bends(costs, kind, model),
        next(iter(find_bends([costs[0], costs[-1]], kind, model)), None) if costs[1:] else None,
        find_knee(model, costs, kind, study.request.efficiency) if len(costs) > 1 else None,
        leave_one_out(every, costs, kind),
        notes,
    )


def _costs_of_kind(study: ScalingStudy, kind: str) -> list[SizeCosts]:
    found = [size_costs(point) for point in study.of_kind(kind)]
    return [size for size in found if size is not None]


def placed_size_at(costs: Sequence[SizeCosts], kind: str, ranks: int) -> PlacedSize:
    """Return where ``ranks`` ranks of a kind run, and their batch, as the largest size does.

    On one node they are assumed to share it; on several, each has as many ranks as before.
    """
    largest = costs[-1]
    batch = largest.batch * largest.ranks / ranks if kind == STRONG else largest.batch
    if largest.hosts == 1:
        return PlacedSize(ranks, 1, ranks, batch)
    per_host = min(largest.per_host, ranks)
    return PlacedSize(ranks, math.ceil(ranks / per_host), per_host, batch)


def next_sizes(sizes: Sequence[int], count: int = NEXT_SIZES) -> list[int]:
    """Return the sizes that continue the measured ones by their last ratio."""
    ratio = sizes[-1] / sizes[-2] if len(sizes) > 1 else 2.0
    found, last = list[int](), sizes[-1]
    while len(found) < count:
        last = max(round(last * ratio), last + 1)
        found.append(last)
    return found


def predict_size(
    model: CostModel, laws: Sequence[LawFit], costs: Sequence[SizeCosts], kind: str, ranks: int
) -> dict[str, Band]:
    """Return the throughput of a size by each model."""
    found = {COST_MODEL: model.throughput(placed_size_at(costs, kind, ranks))}
    found |= {law.law: law.throughput(ranks) for law in laws}
    return found


def predict_next(
    study: ScalingStudy, kind: str, ranks: Sequence[int] | None = None
) -> list[Prediction]:
    """Predict the next two sizes by each model, from all sizes measured until now.

    A size to which the global batch of strong scaling gives no sample per rank is left out. The
    time of the prediction (``made``) is set where it is stored.

    Args:
        ranks: The sizes to predict, instead.
    """
    costs = _costs_of_kind(study, kind)
    if len(costs) < 2:
        return []
    model, laws = fit_cost_model(costs_of_points(study.points)), fit_laws(costs, kind)
    sizes = [size.ranks for size in costs]
    # The batch that is set; the mean of the steps is smaller if the last one of an epoch is.
    largest = max(
        (one.setup for one in study.of_kind(kind) if one.figures), key=lambda one: one.ranks
    )
    found = []
    for size in ranks or next_sizes(sizes):
        whole = largest.global_batch
        batch = whole if kind == STRONG else whole * size // largest.ranks
        if batch < size:
            continue
        for name, band in predict_size(model, laws, costs, kind, size).items():
            if name in (COST_MODEL, UNIVERSAL) and band.value > 0:
                low, high = (max(x, 0.0) for x in (band.low, band.high))
                found.append(Prediction(kind, size, batch, band.value, low, high, name, sizes, 0.0))
    return found


def leave_one_out(
    every: Sequence[SizeCosts], costs: Sequence[SizeCosts], kind: str
) -> list[LeftOut]:
    """Predict each size of a kind from all others, by each model.

    Sizes with the same number of ranks of the other kind are left out as well. Empty with fewer
    than ``MIN_LEFT_OUT_SIZES`` sizes.
    """
    if len(costs) < MIN_LEFT_OUT_SIZES:
        return []
    found = []
    for size in costs:
        others = [x for x in costs if x.ranks != size.ranks]
        model = fit_cost_model([x for x in every if x.ranks != size.ranks])
        place = PlacedSize(size.ranks, size.hosts, size.per_host, size.batch)
        predicted = {COST_MODEL: model.throughput(place).value}
        predicted |= {law.law: law.throughput(size.ranks).value for law in fit_laws(others, kind)}
        found += [
            LeftOut(size.ranks, name, size.throughput, value) for name, value in predicted.items()
        ]
    return found


def find_knee(model: CostModel, costs: Sequence[SizeCosts], kind: str, efficiency: float) -> Knee:
    """Return the largest size whose efficiency, relative to the smallest one, reaches a limit.

    The measured sizes decide as far as they go, the cost model beyond and between them.
    """
    first = costs[0]
    per_rank = first.throughput / first.ranks
    measured = {known.ranks: known for known in costs}
    limit = MAX_KNEE_FACTOR * costs[-1].ranks
    if kind == STRONG:
        limit = max(min(limit, int(first.batch * first.ranks)), costs[-1].ranks)
    best = {"value": first.ranks, "low": first.ranks, "high": first.ranks}
    open_ends = set(best)
    size = first.ranks
    while open_ends and size < limit:
        step = max(size + 1, int(size * _GRID))
        size = min([step, limit, *(x for x in measured if x > size)])
        place = placed_size_at(costs, kind, size)
        band = model.throughput(place)
        if size in measured:
            one = measured[size]
            place = PlacedSize(size, one.hosts, one.per_host, one.batch)
            x, error = one.throughput, 2 * one.error / one.step_s
            band = Band(x, x * (1 - error), x * (1 + error))
        for name in list(open_ends):
            if getattr(band, name) / size >= efficiency * per_rank:
                best[name] = size
            else:
                open_ends.discard(name)
    return Knee(efficiency, best["value"], best["low"], best["high"], "value" in open_ends)
