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
Vectors = dict[str, Vector]  # by parameter: sketch, then the norm of the tensor

EPSILONS = {"float64": 2.3e-16, "float32": 1.2e-7, "bfloat16": 7.9e-3, "float16": 9.8e-4}
ROUNDINGS = 16  # of one operation each, that a sum of few terms is allowed
MAX_TOLERANCE = 0.1
EQUAL_WITHIN = 1e-6  # relative difference of equal values
COMPRESSED = 2e-2  # largest relative error of an exchange in bfloat16
_TINY = 1e-300


def epsilon(dtype: str) -> float:
    """Return the relative rounding error of a dtype; that of float32 for an unknown one."""
    return EPSILONS.get(dtype, EPSILONS["float32"])


def vectors(facts: RankFacts, rows: Mapping[str, int], scale: float = 1.0) -> Vectors:
    """Return the sketches of some rows of a rank, divided by ``scale``, with their norms."""
    found = {}
    for name, row in rows.items():
        values = facts.sketches[row]
        both = np.empty(SKETCH_SIZE + 1)
        both[:SKETCH_SIZE] = values[:SKETCH_SIZE]
        both[SKETCH_SIZE] = np.sqrt(values[SQUARES])
        found[name] = both / scale
    return found


def nonfinite(facts: RankFacts, row: int) -> int:
    """Return the number of elements that are not finite."""
    return int(facts.sketches[row, NONFINITE])


def add(terms: Sequence[Vectors]) -> Vectors:
    """Return the sums by parameter. The norms are added, too: an upper bound of the sum's norm."""
    total: Vectors = {}
    for one in terms:
        for name, values in one.items():
            total[name] = total[name] + values if name in total else values.copy()
    return total


def distance(found: Vector, expected: Vector) -> float:
    """Return the norm of the difference, relative to the larger norm of the two."""
    scale = max(found[SKETCH_SIZE], expected[SKETCH_SIZE])
    if scale <= _TINY:
        return 0.0
    return float(np.linalg.norm(found[:SKETCH_SIZE] - expected[:SKETCH_SIZE]) / scale)


def apart(
    ranks: Sequence[RankFacts], rows: Sequence[Mapping[str, int]], limit: float = EQUAL_WITHIN
) -> dict[str, list[int]]:
    """Return by tensor the ranks whose values differ from those of the first one.

    rows: Of each rank, by tensor.
    """
    found: dict[str, list[int]] = {}
    for rank in range(1, len(ranks)):
        for name, row in rows[0].items():
            if name not in rows[rank]:
                continue
            pairs = ((ranks[0], row), (ranks[rank], rows[rank][name]))
            if len({float(facts.sketches[at, CHECKSUM]) for facts, at in pairs}) > 1:
                one, two = (vectors(facts, {name: at})[name] for facts, at in pairs)
                if distance(one, two) > limit:
                    found.setdefault(name, []).append(rank)
    return found


@dataclass(frozen=True)
class Fit:
    """The multiple of some vectors that is closest to others.

    Attributes:
        factor: The multiple.
        residual: Norm of the remaining difference, relative to the norms of the terms.
    """

    factor: float
    residual: float


def fit(found: Vectors, terms: Vectors, names: Sequence[str]) -> Fit:
    """Return the multiple of ``terms`` that is closest to ``found`` over all parameters."""
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
    """Return the coefficients of the combination of ``terms`` closest to ``found``, and its error.

    The coefficients are None where the terms are too alike to tell them apart.
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
    """Return the largest relative rounding error of a sum of some terms."""
    one = max((epsilon(dtype) for dtype in dtypes), default=EPSILONS["float32"])
    return float(min(ROUNDINGS * max(terms, 1) ** 0.5 * one, MAX_TOLERANCE))


def median(values: Iterable[float]) -> float:
    """Return the median, of an even number of values the larger one; 0 without values."""
    return statistics.median_high(list(values) or [0.0])


def percent(share: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
