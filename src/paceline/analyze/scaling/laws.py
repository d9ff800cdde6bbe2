"""Scaling laws of the throughput: the universal scalability law, Amdahl's and Gustafson's.

    universal   X(P) = X(1) P / (1 + s (P - 1) + k P (P - 1))
    Amdahl      the same with k = 0: s is the share of a step that does not get shorter
    Gustafson   X(P) = X(1) (P - s (P - 1)): weak scaling, s is the serial share of a step

Each is linear in its parameters for P / X or X, with weights from the errors of X.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .costs import SizeCosts
from .study_model import WEAK

Floats = npt.NDArray[np.float64]
DRAWS = 2000  # of the parameters, for their intervals
QUANTILE = 1.96  # of the normal distribution, for 95 % intervals
UNIVERSAL, AMDAHL, GUSTAFSON = "universal scalability law", "Amdahl's law", "Gustafson's law"


@dataclass(frozen=True)
class Parameter:
    """A fitted parameter and its 95 % interval.

    Attributes:
        name: Name in docs/reference/measures.md, or of a term of the cost model.
        unit: "s", "s/byte", "samples/s", or "" for a number.
        meaning: In words.
    """

    name: str
    value: float
    low: float
    high: float
    unit: str = ""
    meaning: str = ""


@dataclass(frozen=True)
class Band:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LawFit:
    """A law that was fitted to the throughputs of one kind of scaling.

    Attributes:
        law: UNIVERSAL, AMDAHL or GUSTAFSON.
        parameters: X(1), s and k.
        sizes: Ranks of the measured sizes.
        draws: Coefficients of the linear form, (draws, terms): for bands.
    """

    law: str
    parameters: list[Parameter]
    sizes: list[int]
    draws: Floats

    def throughput(self, ranks: int) -> Band:
        """Return X(P) with its band."""
        x1 = self.parameters[0].value
        rest = [parameter.value for parameter in self.parameters[1:]]
        if self.law == GUSTAFSON:
            value = x1 * (ranks - rest[0] * (ranks - 1))
            each = self.draws @ np.array([ranks, ranks - 1.0])
        else:
            s, k = [*rest, 0.0][:2]
            value = x1 * ranks / (1 + s * (ranks - 1) + k * ranks * (ranks - 1))
            each = ranks / (self.draws @ _row(ranks)[: self.draws.shape[1]])
        low, high = np.percentile(each, [2.5, 97.5])
        return Band(value, min(float(low), value), max(float(high), value))


def fit_laws(costs: Sequence[SizeCosts], kind: str) -> list[LawFit]:
    """Fit the universal law, and Amdahl's (strong scaling) or Gustafson's (weak scaling).

    A law with as many parameters as sizes passes through all of them. Without two sizes there is
    none, and the universal law needs three.
    """
    found = []
    if len(costs) >= 3:
        found.append(_fit_inverse(costs, UNIVERSAL))
    if len(costs) >= 2:
        found.append(_fit_gustafson(costs) if kind == WEAK else _fit_inverse(costs, AMDAHL))
    return found


def _row(ranks: int) -> Floats:
    return np.array([1.0, ranks - 1.0, ranks * (ranks - 1.0)])


def _fit_inverse(costs: Sequence[SizeCosts], law: str) -> LawFit:
    """Fit P / X = (1 + s (P - 1) + k P (P - 1)) / X(1)."""
    terms = 3 if law == UNIVERSAL else 2
    matrix = np.array([_row(size.ranks)[:terms] for size in costs])
    y = np.array([size.ranks / size.throughput for size in costs])
    sigma = y * np.array([size.error / size.step_s for size in costs])
    value, draws = _non_negative(matrix, y, sigma)
    first = 1 / value[0]
    names = (("s", "contention: work that is not divided"), ("k", "coherency: ranks that wait"))
    ratios = draws[:, 1:] / draws[:, :1]
    parameters = [
        _parameter("X(1)", first, 1 / draws[:, 0], "samples/s", "throughput of one rank"),
        *(
            _parameter(name, value[i + 1] / value[0], ratios[:, i], "", meaning)
            for i, (name, meaning) in enumerate(names[: terms - 1])
        ),
    ]
    return LawFit(law, parameters, [size.ranks for size in costs], draws)


def _fit_gustafson(costs: Sequence[SizeCosts]) -> LawFit:
    """Fit X = X(1) P - X(1) s (P - 1)."""
    matrix = np.array([[size.ranks, -(size.ranks - 1.0)] for size in costs])
    y = np.array([size.throughput for size in costs])
    sigma = y * np.array([size.error / size.step_s for size in costs])
    value, draws = _non_negative(matrix, y, sigma)
    parameters = [
        _parameter("X(1)", value[0], draws[:, 0], "samples/s", "throughput of one rank"),
        _parameter("s", value[1] / value[0], draws[:, 1] / draws[:, 0], "", "serial share"),
    ]
    return LawFit(GUSTAFSON, parameters, [size.ranks for size in costs], draws * [1.0, -1.0])


def _parameter(name: str, value: float, draws: Floats, unit: str, meaning: str) -> Parameter:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Parameter(
        name, float(value), min(float(low), value), max(float(high), value), unit, meaning
    )


def _non_negative(matrix: Floats, y: Floats, sigma: Floats) -> tuple[Floats, Floats]:
    """Return the least-squares solution with coefficients >= 0, and draws around it.

    Of the few subsets of columns, the best one without negative coefficients is taken; the draws
    are those of all columns, with negative coefficients set to 0.
    """
    rows, terms = matrix.shape
    scaled, target = matrix / sigma[:, None], y / sigma
    best: tuple[float, Floats] | None = None
    for mask in range(1, 1 << terms):
        columns = [i for i in range(terms) if mask >> i & 1]
        if 0 not in columns:  # X(1) is finite
            continue
        value = np.zeros(terms)
        value[columns] = np.linalg.lstsq(scaled[:, columns], target, rcond=None)[0]
        residual = float(((target - scaled @ value) ** 2).sum())
        if (value >= 0).all() and (best is None or residual < best[0] - 1e-12):
            best = residual, value
    assert best is not None, "one column alone has a solution"
    residual, value = best
    covariance = np.linalg.inv(scaled.T @ scaled)
    if rows > terms:
        covariance *= max(1.0, residual / (rows - terms))
    free = np.linalg.lstsq(scaled, target, rcond=None)[0]
    draws = np.random.default_rng(0).multivariate_normal(free, covariance, DRAWS)
    draws = np.maximum(draws, 0.0)
    draws[:, 0] = np.maximum(draws[:, 0], 1e-3 * value[0])
    return value, draws
