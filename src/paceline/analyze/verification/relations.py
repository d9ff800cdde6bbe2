"""Relations between sketched tensors: is a gradient the mean, the sum or a part of others?

Sketches are linear, so a relation between tensors holds between their sketches. It is tested per
parameter, relative to the norms of the terms, so that cancellation does not look like an error.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...observe.facts.ranks import CHECKSUM, NONFINITE, SKETCH_SIZE, SQUARES, RankFacts

Vector = NDArray[np.float64]
Vectors = dict[str, Vector]  # by parameter: the SKETCH_SIZE numbers of the sketch, then the norm

# Relative rounding errors.
EPSILONS = {"float64": 2.3e-16, "float32": 1.2e-7, "bfloat16": 7.9e-3, "float16": 9.8e-4}
MAX_ROUNDINGS = 16  # accepted error of one addition, in rounding errors of the dtype
MAX_TOLERANCE = 0.1  # accepted relative error of a sum of any number of terms
EQUAL_WITHIN = 1e-6  # largest relative difference of values that count as equal
MAX_BF16_EXCHANGE_ERROR = 2e-2  # relative error of gradients that are exchanged in bfloat16
_TINY = 1e-300  # norms up to this count as zero: nothing is divided by them


def epsilon(dtype: str) -> float:
    """Return the relative rounding error of a dtype; that of float32 for an unknown one."""
    return EPSILONS.get(dtype, EPSILONS["float32"])


def vectors(facts: RankFacts, rows: Mapping[str, int], scale: float = 1.0) -> Vectors:
    """Return the sketches and norms of some tensors of a rank, divided by ``scale``.

    Args:
        rows: Row of each tensor in ``facts.sketches``, by name.
    """
    found = {}
    for name, row in rows.items():
        values = facts.sketches[row]
        sketch_and_norm = np.empty(SKETCH_SIZE + 1)
        sketch_and_norm[:SKETCH_SIZE] = values[:SKETCH_SIZE]
        sketch_and_norm[SKETCH_SIZE] = np.sqrt(values[SQUARES])
        found[name] = sketch_and_norm / scale
    return found


def nonfinite(facts: RankFacts, row: int) -> int:
    """Return the number of elements of the tensor in a row that are not finite."""
    return int(facts.sketches[row, NONFINITE])


def add(terms: Sequence[Vectors]) -> Vectors:
    """Return the sum of each parameter. Norms are added as well: a bound of the sum's norm."""
    total: Vectors = {}
    for term in terms:
        for name, values in term.items():
            total[name] = total[name] + values if name in total else values.copy()
    return total


def distance(found: Vector, expected: Vector) -> float:
    """Return the norm of the difference, relative to the larger norm of the two."""
    scale = max(found[SKETCH_SIZE], expected[SKETCH_SIZE])
    if scale <= _TINY:
        return 0.0
    return float(np.linalg.norm(found[:SKETCH_SIZE] - expected[:SKETCH_SIZE]) / scale)


def differing_ranks(
    ranks: Sequence[RankFacts], rows: Sequence[Mapping[str, int]], limit: float = EQUAL_WITHIN
) -> dict[str, list[int]]:
    """Return the ranks whose values of a tensor differ from those of the first rank, by tensor.

    Ranks are positions in ``ranks``; tensors without a difference are left out.

    Args:
        rows: For each rank, the row of each tensor in its sketches, by name.
        limit: Largest relative difference of values that count as equal.
    """
    found: dict[str, list[int]] = {}
    for rank in range(1, len(ranks)):
        for name, row in rows[0].items():
            if name not in rows[rank]:
                continue
            pairs = ((ranks[0], row), (ranks[rank], rows[rank][name]))
            if len({float(facts.sketches[at, CHECKSUM]) for facts, at in pairs}) > 1:
                first, other = (vectors(facts, {name: at})[name] for facts, at in pairs)
                if distance(first, other) > limit:
                    found.setdefault(name, []).append(rank)
    return found


@dataclass(frozen=True)
class Fit:
    """Least-squares fit ``found = factor * terms``.

    Attributes:
        factor: The factor.
        residual: Norm of ``found - factor * terms``, relative to the larger norm of the two.
    """

    factor: float
    residual: float


def fit(found: Vectors, terms: Vectors, names: Sequence[str]) -> Fit:
    """Return the multiple of ``terms`` that is closest to ``found`` over some parameters."""
    a = np.concatenate([found[name][:SKETCH_SIZE] for name in names])
    b = np.concatenate([terms[name][:SKETCH_SIZE] for name in names])
    square = float(b @ b)
    norms = float(np.linalg.norm([terms[name][SKETCH_SIZE] for name in names]))
    size = float(np.linalg.norm([found[name][SKETCH_SIZE] for name in names]))
    if square <= _TINY or norms <= _TINY:
        return Fit(0.0, 0.0 if size <= _TINY else 1.0)
    factor = float(a @ b) / square
    scale = max(abs(factor) * norms, size, _TINY)
    return Fit(factor, float(np.linalg.norm(a - factor * b)) / scale)


def solve(
    found: Vectors, terms: Sequence[Vectors], names: Sequence[str]
) -> tuple[Vector | None, float]:
    """Return the coefficients of the linear combination of ``terms`` closest to ``found``.

    Returns:
        The coefficients and the relative error of the combination; (None, 1.0) if a term is zero,
        or if the terms are nearly linearly dependent, so that coefficients are not determined.
    """
    a = np.concatenate([found[name][:SKETCH_SIZE] for name in names])
    columns = np.stack(
        [np.concatenate([term[name][:SKETCH_SIZE] for name in names]) for term in terms], axis=1
    )
    norms = np.linalg.norm(columns, axis=0)
    if (norms <= _TINY).any() or len(a) < 4 * len(terms):
        return None, 1.0
    solution, _, rank, singular = np.linalg.lstsq(columns / norms, a, rcond=1e-6)
    if rank < len(terms) or singular[-1] < 1e-3 * singular[0]:
        return None, 1.0
    values = solution / norms
    error = float(np.linalg.norm(a - columns @ values))
    scale = max(float(np.abs(values) @ norms), float(np.linalg.norm(a)), _TINY)
    return values, error / scale


def tolerance(terms: int, *dtypes: str) -> float:
    """Return the accepted relative rounding error of a sum of ``terms`` terms of some dtypes."""
    largest = max((epsilon(dtype) for dtype in dtypes), default=EPSILONS["float32"])
    # Errors of independent additions grow with the square root of their number.
    return float(min(MAX_ROUNDINGS * max(terms, 1) ** 0.5 * largest, MAX_TOLERANCE))


def median(values: Iterable[float]) -> float:
    """Return the median: the larger middle one of an even number of values; 0 without values."""
    return statistics.median_high(list(values) or [0.0])


def percent(share: float) -> str:
    """Format a share in percent: integers from 10 % on, two significant digits below."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
