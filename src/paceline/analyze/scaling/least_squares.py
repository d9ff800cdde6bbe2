"""Least squares with few points: candidate sums of terms, weighted by how well they explain them.

A law with as many terms as points always fits. Therefore every candidate is judged by Akaike's
criterion, chi-square + 2 x terms, with the measured errors of the points, and predictions are means
over the candidates with Akaike's weights (Burnham and Anderson, Model Selection and Multimodel
Inference, 2002). The candidates are linear in their parameters, so the covariance of the parameters
is that of a Gauss-Newton step, exactly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

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
            one.shape == space.shape and np.abs(one @ one.T - space @ space.T).max() < _SAME
            for one in seen
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
