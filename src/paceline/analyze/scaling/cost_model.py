"""The cost model of a step (docs/reference/measures.md, "Scaling"), fitted to the measured parts.

    t(P) = t_comp(b) + t_wait(P) + max(0, t_ex(P) - t_overlap) + t_serial

Every part of a step has its own laws, of which one parameter each is fitted: computing for a sample
and for a step, the expected lateness of the last of P ranks, latencies and bytes of the collectives
of each level of the network, serial work of validation, checkpoints and the script. Which of the
laws hold is decided by the measured points (``fit_terms``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...cost.collectives import collective_terms
from .costs import (
    CHECKPOINT,
    COMPUTE,
    EXCHANGE,
    INPUT,
    JITTER,
    LEAST_PART,
    PARTS,
    SCRIPT,
    SLOW_RANK,
    STARVED,
    VALIDATION,
    SizeCosts,
    normal_max,
    quantile_max,
)
from .laws import QUANTILE, Band, Parameter

# Least squares with few points: candidate sums of terms, weighted by how well they explain them.
#
# A law with as many terms as points always fits. Therefore every candidate is judged by Akaike's
# criterion, chi-square + 2 x terms, with the measured errors of the points, and predictions are
# means over the candidates with Akaike's weights (Burnham and Anderson, Model Selection and
# Multimodel Inference, 2002). The candidates are linear in their parameters, so the covariance of
# the parameters is that of a Gauss-Newton step, exactly.

Floats = npt.NDArray[np.float64]
MIN_WEIGHT = 1e-3  # candidates below it are left out
_SAME = 1e-6  # relative difference up to which two sets of columns are the same candidate
_MAX_CONDITION = 1e8  # of the scaled columns


@dataclass(frozen=True)
class TermFit:
    """One candidate: a sum of terms with coefficients >= 0.

    Attributes:
        names: Names of the terms.
        values: Coefficient of each term.
        covariance: Of the coefficients.
        weight: Akaike's weight among the candidates.
    """

    names: tuple[str, ...]
    values: Floats
    covariance: Floats
    weight: float


@dataclass(frozen=True)
class MixedFit:
    """All candidates that explain the points, the one with the largest weight first."""

    fits: list[TermFit]

    def predict(self, terms: Mapping[str, float]) -> tuple[float, float]:
        """Return the prediction and its standard error.

        terms: Value of each term at the point.
        """
        means, variances, weights = [], [], []
        for fit in self.fits:
            row = np.array([terms[name] for name in fit.names])
            means.append(float(row @ fit.values))
            variances.append(float(row @ fit.covariance @ row))
            weights.append(fit.weight)
        mean = sum(w * m for w, m in zip(weights, means, strict=True))
        each = zip(weights, means, variances, strict=True)
        variance = sum(w * (v + (m - mean) ** 2) for w, m, v in each)
        return mean, math.sqrt(max(variance, 0.0))

    def by_term(self, terms: Mapping[str, float]) -> dict[str, float]:
        """Return the contribution of each term to the prediction."""
        found: dict[str, float] = {}
        for fit in self.fits:
            for name, value in zip(fit.names, fit.values, strict=True):
                found[name] = found.get(name, 0.0) + fit.weight * float(value) * terms[name]
        return found

    def coefficients(self) -> dict[str, tuple[float, float, float]]:
        """Return each term's mean coefficient over the candidates that have it, its standard error,
        and the weight of these candidates.
        """
        found: dict[str, tuple[float, float, float]] = {}
        for name in {name: None for fit in self.fits for name in fit.names}:
            having = [(fit, fit.names.index(name)) for fit in self.fits if name in fit.names]
            whole = sum(fit.weight for fit, _ in having)
            mean = sum(fit.weight * float(fit.values[i]) for fit, i in having) / whole
            variance = (
                sum(
                    fit.weight * (float(fit.covariance[i, i]) + (float(fit.values[i]) - mean) ** 2)
                    for fit, i in having
                )
                / whole
            )
            found[name] = (mean, math.sqrt(max(variance, 0.0)), whole)
        return found


def fit_terms(
    values: Sequence[float],
    errors: Sequence[float],
    columns: Mapping[str, Sequence[float]],
    candidates: Sequence[tuple[str, ...]],
) -> MixedFit:
    """Fit each candidate to the points, and weight them.

    Of candidates that are the same at all points, the first one is kept. A candidate with a
    negative coefficient, or with more terms than points, is left out. The sum without terms, 0, is
    always a candidate.

    Args:
        values: Measured values.
        errors: Standard error of each, > 0.
        columns: Value of each term at each point.
        candidates: Names of the terms of each candidate, the simplest and likeliest first.
    """
    y, sigma = np.asarray(values, float), np.asarray(errors, float)
    found: list[tuple[float, TermFit]] = []
    seen: list[Floats] = []
    for names in ((), *candidates):
        matrix = np.array([columns[name] for name in names], float).reshape(len(names), len(y)).T
        fitted = _fit(y, sigma, matrix, seen)
        if fitted is not None:
            criterion, value, covariance = fitted
            found.append((criterion, TermFit(names, value, covariance, 0.0)))
    least = min(criterion for criterion, _ in found)
    weighted = [(math.exp((least - criterion) / 2), fit) for criterion, fit in found]
    kept = [(weight, fit) for weight, fit in weighted if weight > MIN_WEIGHT]
    whole = sum(weight for weight, _ in kept)
    fits = [replace(fit, weight=weight / whole) for weight, fit in kept]
    return MixedFit(sorted(fits, key=lambda fit: -fit.weight))


def _fit(
    y: Floats, sigma: Floats, matrix: Floats, seen: list[Floats]
) -> tuple[float, Floats, Floats] | None:
    """Return Akaike's criterion, the coefficients and their covariance; None: left out."""
    rows, terms = matrix.shape
    norms = np.linalg.norm(matrix, axis=0)
    if terms > rows or not norms.all():
        return None
    scaled = matrix / norms / sigma[:, None]
    if terms:
        space = np.linalg.qr(scaled)[0]
        if np.linalg.cond(scaled) > _MAX_CONDITION or any(
            basis.shape == space.shape and np.abs(basis @ basis.T - space @ space.T).max() < _SAME
            for basis in seen
        ):
            return None
        seen.append(space)
    normal = scaled.T @ scaled
    covariance = np.linalg.inv(normal) if terms else np.zeros((0, 0))
    value = covariance @ (scaled.T @ (y / sigma)) if terms else np.zeros(0)
    if (value < 0).any():
        return None
    chi_square = float(((y / sigma - scaled @ value) ** 2).sum())
    if rows > terms:  # the points differ by more than their errors say
        covariance = covariance * max(1.0, chi_square / (rows - terms))
    return chi_square + 2 * terms, value / norms, covariance / np.outer(norms, norms)


# Message size at which latency and bytes cost the same, and a call costs at most about one latency:
# starting values, with an uncertainty of 100 %, where the measured sizes do not tell them apart.
USUAL_HALF_BYTES = 256 << 10
MIN_TERM_WEIGHT = 0.3  # of all candidates, those with a term: then its parameter is shown
_LEAST = 1e-12

STEP, SAMPLE, SHARED = "a step", "a sample", "a sample and rank of the node"
ALL_SAMPLES, DIVIDED, RANKS = "a sample of all ranks", "divided among the ranks", "a rank"
LATE, LATE_SAMPLE = "lateness", "lateness a sample"
FIXED, FIXED_SAMPLE = "one late rank", "one late rank a sample"
CROWD, CROWD_SAMPLE = "a lacking core", "a sample and lacking core"
_SERIAL = ((STEP,), (DIVIDED,), (ALL_SAMPLES,), (SAMPLE,), (STEP, DIVIDED))
CANDIDATES: dict[str, tuple[tuple[str, ...], ...]] = {
    COMPUTE: ((SAMPLE,), (STEP,), (STEP, SAMPLE), (SAMPLE, SHARED), (STEP, SAMPLE, SHARED)),
    SLOW_RANK: ((FIXED,), (FIXED_SAMPLE,)),
    JITTER: ((LATE,), (LATE_SAMPLE,)),
    INPUT: ((SAMPLE,), (STEP,), (ALL_SAMPLES,), (STEP, SAMPLE), (SAMPLE, ALL_SAMPLES)),
    VALIDATION: _SERIAL,
    CHECKPOINT: _SERIAL,
    SCRIPT: ((STEP,), (SAMPLE,), (STEP, SAMPLE), (RANKS,), (STEP, RANKS)),
    STARVED: ((CROWD_SAMPLE,), (CROWD,), (STEP,), (STEP, CROWD)),
}


@dataclass(frozen=True)
class PlacedSize:
    """A size as the model needs it: ranks, nodes, and samples per rank and step."""

    ranks: int
    hosts: int
    per_host: int
    batch: float


@dataclass(frozen=True)
class ExchangeFit:
    """Fit of the collectives' times.

    Attributes:
        fit: Over latencies and bytes of each level: seconds of a step, exposed or not.
        costs: The measured sizes; the collectives of the largest one are those of larger ones.
        overlap: Seconds of communication that fit under a second of computing.
        exposed: Share of the communication that is exposed at least, because nothing is computed
            after the last gradient.
    """

    fit: MixedFit
    costs: list[SizeCosts]
    overlap: float
    exposed: float

    def seconds(
        self, place: PlacedSize, cores: int | None, computing_s: float
    ) -> tuple[float, float]:
        """Return the exposed seconds of a step and their standard error."""
        whole, error = self.fit.predict(exchange_terms(self.costs[-1], place, cores))
        return max(whole - self.overlap * computing_s, self.exposed * whole), error

    def latency_share(self, costs: SizeCosts) -> float:
        """Return the share of the exchange that latencies take at a measured size."""
        by_term = self.fit.by_term(exchange_terms(costs, placed_size(costs), costs.cores))
        whole = sum(by_term.values())
        late = sum(value for name, value in by_term.items() if not name.startswith("bytes"))
        if whole <= 0:
            calls = sum(load.calls for load in costs.exchanges)
            mean = sum(load.bytes for load in costs.exchanges) / calls if calls else 0.0
            return float(mean < USUAL_HALF_BYTES)
        return late / whole


@dataclass(frozen=True)
class CostModel:
    """The fitted parts.

    Attributes:
        costs: The sizes that it was fitted to, by ranks.
        fits: By part, without the exchange.
        exchange: None if no size exchanges anything.
    """

    costs: list[SizeCosts]
    fits: dict[str, MixedFit]
    exchange: ExchangeFit | None

    def parts(self, place: PlacedSize) -> dict[str, tuple[float, float]]:
        """Return the predicted seconds of each part of a step, and their standard errors."""
        terms = self._terms(place)
        found = {name: fit.predict(terms) for name, fit in self.fits.items()}
        if self.exchange is not None:
            cores = self.costs[-1].cores
            found[EXCHANGE] = self.exchange.seconds(place, cores, found[COMPUTE][0])
        return found

    def step_s(self, place: PlacedSize) -> Band:
        """Return the predicted duration of a step with its 95 % band.

        The band contains what equal runs differ by.
        """
        found = self.parts(place)
        value = sum(seconds for seconds, _ in found.values())
        noise = max(size.error / size.step_s for size in self.costs) * value
        half = QUANTILE * math.sqrt(sum(error**2 for _, error in found.values()) + noise**2)
        return Band(value, max(value - half, _LEAST), value + half)

    def throughput(self, place: PlacedSize) -> Band:
        """Return the predicted samples/s of the whole job with its 95 % band."""
        step = self.step_s(place)
        samples = place.ranks * place.batch
        return Band(*(samples / seconds for seconds in (step.value, step.high, step.low)))

    def by_term(self, part: str, costs: SizeCosts) -> dict[str, float]:
        """Return what each term of a part contributes at a measured size (s)."""
        return self.fits[part].by_term(self._terms(placed_size(costs)))

    def parameters(self) -> list[Parameter]:
        """Return the likely terms' parameters with 95 % intervals, in the order of PARTS."""
        found = []
        for name in PARTS:
            fit = self.fits.get(name)
            if name == EXCHANGE and self.exchange is not None:
                fit = self.exchange.fit
            if fit is None:
                continue
            for term, (value, error, weight) in fit.coefficients().items():
                if weight < MIN_TERM_WEIGHT:
                    continue
                half = QUANTILE * error
                unit = "s/byte" if term.startswith("bytes") else "s"
                key = f"{name}: {term}"
                found.append(Parameter(key, value, max(value - half, 0.0), value + half, unit))
        return found

    def _terms(self, place: PlacedSize) -> dict[str, float]:
        return model_terms(place, self.costs[-1].cores, _lateness(self.costs))


def placed_size(costs: SizeCosts) -> PlacedSize:
    return PlacedSize(costs.ranks, costs.hosts, costs.per_host, costs.batch)


def fit_cost_model(costs: Sequence[SizeCosts]) -> CostModel:
    """Fit every part to the measured sizes, of both kinds of scaling together."""
    ordered = sorted(costs, key=lambda size: (size.ranks, size.batch))
    late = _lateness(ordered)
    rows = [model_terms(placed_size(size), size.cores, late) for size in ordered]
    fits = {}
    for name, candidates in CANDIDATES.items():
        columns = {term: [row[term] for row in rows] for term in rows[0]}
        values = [size.parts[name] for size in ordered]
        fits[name] = fit_terms(values, [size.errors[name] for size in ordered], columns, candidates)
    return CostModel(ordered, fits, _fit_exchange(ordered))


def model_terms(place: PlacedSize, cores: int | None, late: Sequence[float]) -> dict[str, float]:
    """Return the value of every term at a size; late: quantiles of the ranks' computing times."""
    p, b = place.ranks, place.batch
    lacking = max(place.per_host / cores - 1, 0.0) if cores else float(place.per_host - 1)
    draws = quantile_max(late, p) if late else normal_max(p)
    fixed = float(p > 1)
    return {
        STEP: 1.0,
        SAMPLE: b,
        SHARED: b * (place.per_host - 1),
        ALL_SAMPLES: b * p,
        DIVIDED: 1 / p,
        RANKS: p,
        LATE: draws,
        LATE_SAMPLE: draws * b,
        FIXED: fixed,
        FIXED_SAMPLE: fixed * b,
        CROWD: lacking,
        CROWD_SAMPLE: lacking * b,
    }


def _lateness(costs: Sequence[SizeCosts]) -> list[float]:
    """Return the quantiles of the computing times at the largest size, in units of their standard
    deviation.

    Empty, for a normal distribution, where validation or checkpoints are among these times, or
    where a rank always computes longer.
    """
    largest = costs[-1]
    rare = sum(largest.parts[name] for name in (VALIDATION, CHECKPOINT, SLOW_RANK))
    quantiles, count = largest.quantiles, len(largest.quantiles)
    if count < 3 or rare > largest.parts[JITTER]:
        return []
    spread = float(np.std(np.interp(np.linspace(0, 1, 1000), np.linspace(0, 1, count), quantiles)))
    return [quantile / spread for quantile in quantiles] if spread > 0 else []


def exchange_terms(costs: SizeCosts, place: PlacedSize, cores: int | None) -> dict[str, float]:
    """Return the exchange's terms for the collectives of ``costs`` at another size.

    "latency" and "bytes" are those of a ring over all ranks, "calls" is what a call takes in a
    group of any size. With several nodes also those of a node and between the nodes.

    Where m ranks share a core, two laws are usual for what is added to them: a message finds the
    core of its rank in use in a share 1 - 1/m of cases ("core in use"), or each core works for
    all of its ranks in turn, m - 1 others ("other ranks of a core").
    """
    crowd = max(place.per_host / cores, 1.0) if cores else 1.0
    names = [f"{what}{level}" for level in _LEVELS for what in _EXCHANGE_TERMS]
    result = dict.fromkeys(names, 0.0)
    for load in costs.exchanges:
        members = load.members
        if load.grows:
            members = max(round(load.members * place.ranks / costs.ranks), 1)
        flat = collective_terms(load.kind, members)
        inside = collective_terms(load.kind, min(place.per_host, members))
        between = collective_terms(load.kind, place.hosts)
        one_node = place.hosts == 1
        for level, terms, factor in (
            (_FLAT, flat, 1.0),
            (_IN_USE, flat, 1 - 1 / crowd),
            (_OTHERS, flat, crowd - 1),
            (_FLAT_NODE, flat, float(one_node)),
            (_FLAT_NETWORK, flat, float(not one_node)),
            (_NODE, inside, 1.0),
            (_NETWORK, between, 1.0),
        ):
            result[f"calls{level}"] += factor * load.calls * (terms.latencies > 0)
            result[f"latency{level}"] += factor * load.calls * terms.latencies
            result[f"bytes{level}"] += factor * load.bytes * terms.vectors
    return result


_FLAT, _IN_USE, _OTHERS = "", ", core in use", ", other ranks of a core"
_FLAT_NODE, _FLAT_NETWORK = ", one node", ", several nodes"
_NODE, _NETWORK = ", in a node", ", between nodes"
_EXCHANGE_CANDIDATES = (
    *(("latency", "bytes"), ("latency",), ("bytes",)),
    *(("calls", "latency"), ("calls", "bytes")),
)
_EXCHANGE_TERMS = ("calls", "latency", "bytes")
_LEVELS = (_FLAT, _IN_USE, _OTHERS, _FLAT_NODE, _FLAT_NETWORK, _NODE, _NETWORK)


def _fit_exchange(costs: Sequence[SizeCosts]) -> ExchangeFit | None:
    """Fit latency and time per byte of each level to the collectives' times."""
    communicating = [size for size in costs if size.exchanges and size.parts[EXCHANGE] > 0]
    if not communicating:
        return None
    rows: list[dict[str, float]] = []
    values: list[float] = []
    errors: list[float] = []
    for size in communicating:
        flying = sum(load.seconds - load.exposed for load in size.exchanges)
        exposed = max(size.parts[EXCHANGE], LEAST_PART * size.step_s)
        rows.append(exchange_terms(size, placed_size(size), size.cores))
        values.append(size.parts[EXCHANGE] + flying)
        # as parts of a step vary: with the square root of their duration
        errors.append(size.errors[EXCHANGE] * math.sqrt((exposed + flying) / exposed))
    several = [size.hosts > 1 for size in communicating]
    if any(several) and not all(size.per_host == 1 for size in communicating):
        pairs: list[tuple[str, ...]] = [(_FLAT_NODE, _FLAT_NETWORK), (_NODE, _NETWORK)]
    elif any(size.cores and size.per_host > size.cores for size in communicating):
        pairs = [(_FLAT,), (_FLAT, _IN_USE), (_FLAT, _OTHERS)]
    else:
        pairs = [(_FLAT,)]
    candidates: list[tuple[str, ...]] = []
    for levels in pairs:
        candidates += [
            tuple(f"{what}{level}" for level in levels for what in whats)
            for whats in _EXCHANGE_CANDIDATES
        ]
    scale = _usual_latency(rows, values)
    for level in {level for levels in pairs for level in levels}:
        usual = dict.fromkeys(rows[0], 0.0)
        half = {f"latency{level}": 1.0, f"bytes{level}": -float(USUAL_HALF_BYTES)}
        rows += [usual | half, usual | {f"calls{level}": 1.0}]
        values += [0.0, 0.0]
        errors += [scale, scale]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    fit = fit_terms(values, errors, columns, candidates)
    return ExchangeFit(fit, list(costs), *_overlap(communicating))


def _usual_latency(rows: Sequence[Mapping[str, float]], values: Sequence[float]) -> float:
    """Return the latency in s if latency and bytes cost the same at ``USUAL_HALF_BYTES``."""
    equivalent = sum(row["latency"] + row["bytes"] / USUAL_HALF_BYTES for row in rows)
    return max(sum(values) / max(equivalent, _LEAST), _LEAST)


def _overlap(costs: Sequence[SizeCosts]) -> tuple[float, float]:
    """Return ``overlap`` and ``exposed`` of ExchangeFit, from the sizes that communicate."""
    overlap, exposed = 0.0, 1.0
    for size in costs:
        flying = sum(load.seconds - load.exposed for load in size.exchanges)
        whole = size.parts[EXCHANGE] + flying
        if size.parts[COMPUTE] > 0:
            overlap = max(overlap, flying / size.parts[COMPUTE])
        if whole > 0:
            exposed = min(exposed, size.parts[EXCHANGE] / whole)
    return overlap, exposed
