"""Harmonica: spectral search over many categorical parameters, as a sampler of Optuna.

Hazan, Klivans and Yuan, arXiv 1706.00764. The value of a study is taken for a sparse polynomial of
low degree in its categorical parameters. Each of a few stages

1. draws points at random, among those that the stage before has left,
2. finds the largest terms of the polynomial by the lasso,
3. fixes the parameters of these terms to the assignments for which their sum is smallest.

After the stages, the parameters that are not fixed are drawn by TPE. Parameters that are no choices
are drawn at random during the stages.

Differences from the paper: A stage fits the points of all stages (the paper: its own, with the
parameters of earlier stages fixed), and finds as many more terms as it has more points. Terms that
share no parameters are minimized separately. The penalty of the lasso follows from the number of
terms. A parameter with k choices has k - 1 functions that are orthonormal for uniform choices; for
k = 2 they are -1 and 1, as in the paper.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.search_space import intersection_search_space
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

Array = np.ndarray[Any, Any]
Space = dict[str, CategoricalDistribution]
# A fixed part of the space: names of parameters, and assignments of the numbers of their choices.
Restriction = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]

MAX_TERMS = 200_000  # of the polynomial; the degree is lowered for more
MAX_ASSIGNMENTS = 1 << 14  # of parameters whose terms are connected
SIGNIFICANT = 3.0  # standard errors of a weight
FOLDS = 5  # of the cross-validation
TIE_SHARE = 1e-6  # of the range of the sums: those of equal assignments differ by rounding


class HarmonicaSampler(BaseSampler):
    """The sampler. It has no state: what it has found follows from the completed trials.

    Args:
        seed: Of what it draws.
        samples: Completed trials of each stage.
        stages: Number of stages.
        degree: Largest number of parameters in a term.
        terms: Number of terms that the first stage finds; the n-th one finds n times as many.

    Raises:
        ValueError: An argument is below 1.
    """

    def __init__(
        self,
        seed: int | None = None,
        samples: int = 100,
        stages: int = 2,
        degree: int = 3,
        terms: int = 10,
    ) -> None:
        numbers = {"samples": samples, "stages": stages, "degree": degree, "terms": terms}
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1; it is {value}")
        self._samples, self._stages, self._degree, self._terms = samples, stages, degree, terms
        self._rng = np.random.default_rng(seed)
        self._random = RandomSampler(seed)
        self._last = TPESampler(seed=seed)

    def reseed_rng(self) -> None:
        self._rng = np.random.default_rng()
        self._random.reseed_rng()
        self._last.reseed_rng()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return dict(_choices(study))

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        space = {
            name: one
            for name, one in search_space.items()
            if isinstance(one, CategoricalDistribution)
        }
        values: dict[str, Any] = {}
        for names, assignments in self.restrictions(study, space):
            chosen = assignments[self._rng.integers(len(assignments))]
            for name, number in zip(names, chosen, strict=True):
                values[name] = space[name].choices[number]
        return values

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        completed = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
        sampler = self._last if completed >= self._stages * self._samples else self._random
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def restrictions(self, study: Study, space: Space) -> list[Restriction]:
        """Return what the last complete stage has fixed."""
        complete = [trial for trial in _in_order(study) if space.keys() <= trial.params.keys()]
        stage = min(len(complete) // self._samples, self._stages)
        if not stage or not space:
            return []
        sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
        data = tuple(
            (
                tuple(int(of.to_internal_repr(trial.params[name])) for name, of in space.items()),
                sign * float(trial.value or 0.0),
            )
            for trial in complete[: stage * self._samples]
        )
        sizes = tuple(len(distribution.choices) for distribution in space.values())
        names = tuple(space)
        return [
            (tuple(names[parameter] for parameter in parameters), assignments)
            for parameters, assignments in smallest_of_terms(
                data, sizes, self._degree, stage * self._terms
            )
        ]


def _choices(study: Study) -> Space:
    """Return the parameters with several choices that all completed trials have."""
    known = intersection_search_space(study.get_trials(deepcopy=False))
    return {
        name: one
        for name, one in known.items()
        if isinstance(one, CategoricalDistribution) and len(one.choices) > 1
    }


def _in_order(study: Study) -> list[FrozenTrial]:
    """Return the completed trials in the order in which they ended, which never changes."""
    found = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    finite = [trial for trial in found if trial.value is not None and math.isfinite(trial.value)]
    return sorted(finite, key=lambda trial: (trial.datetime_complete, trial.number))


Data = tuple[tuple[tuple[int, ...], float], ...]
Assignments = tuple[tuple[int, ...], ...]
# A term: pairs of a parameter and the number of one of its functions.
Term = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=8)  # each trial asks for the same stage again
def smallest_of_terms(
    data: Data, sizes: tuple[int, ...], degree: int, count: int
) -> list[tuple[tuple[int, ...], Assignments]]:
    """Return the assignments for which the sum of the largest terms is smallest.

    Args:
        data: Points, as numbers of choices, and their values.
        sizes: Number of choices of each parameter.
        degree: Largest number of parameters in a term.
        count: Number of terms.

    Returns:
        Parameters whose terms have none in common with others, with their smallest assignments.
    """
    points = np.array([point for point, _ in data], dtype=np.int64)
    values = np.array([value for _, value in data])
    groups = _separate(largest_terms(points, values, sizes, degree, count), sizes)
    terms = [term for group in groups for term in group]
    features = [_evaluate(points, term, sizes) for term in terms]
    fitted, _ = _fit(np.reshape(features, (len(terms), len(points))).T, values)
    weights = dict(zip(terms, fitted, strict=True))
    found = []
    for group in groups:
        used = _parameters(group)
        table = np.array(list(itertools.product(*(range(sizes[n]) for n in used))))
        whole = np.zeros((len(table), len(sizes)), dtype=np.int64)
        whole[:, used] = table
        sums = np.sum([weights[term] * _evaluate(whole, term, sizes) for term in group], axis=0)
        smallest = table[sums <= sums.min() + TIE_SHARE * np.ptp(sums)]
        found.append((tuple(used), tuple(map(tuple, smallest.tolist()))))
    return found


def _parameters(terms: Sequence[Term]) -> list[int]:
    return sorted({parameter for term in terms for parameter, _ in term})


def _separate(terms: Sequence[Term], sizes: Sequence[int]) -> list[list[Term]]:
    """Return groups of terms without common parameters.

    A term that makes a group of more than MAX_ASSIGNMENTS assignments is left out.
    """
    groups: list[list[Term]] = []
    for term in terms:  # the largest first
        own = {parameter for parameter, _ in term}
        joined = [group for group in groups if own & set(_parameters(group))]
        merged = [*itertools.chain(*joined), term]
        if math.prod(sizes[n] for n in _parameters(merged)) <= MAX_ASSIGNMENTS:
            groups = [group for group in groups if group not in joined] + [merged]
    return groups


def largest_terms(
    points: Array, values: Array, sizes: Sequence[int], degree: int, count: int
) -> list[Term]:
    """Return the terms of the polynomial with the largest weights, the largest first.

    The penalty of the lasso is chosen by cross-validation (the paper takes it as given). Of the
    terms that it keeps, those remain whose weight is above SIGNIFICANT standard errors.
    """
    from sklearn.linear_model import LassoLarsCV  # type: ignore[import-untyped]

    centred = values - values.mean()
    if not centred.any():
        return []
    columns = [(n, function) for n, size in enumerate(sizes) for function in range(size - 1)]
    single = np.column_stack([_evaluate(points, (column,), sizes) for column in columns])
    terms = _terms([parameter for parameter, _ in columns], degree)
    matrix = np.concatenate([single[:, of].prod(axis=2) for of in terms], axis=1)
    ordered = [tuple(columns[n] for n in of) for group in terms for of in group]
    most = min(count, len(points) // 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the path ended early
        lasso = LassoLarsCV(max_iter=2 * most, cv=FOLDS).fit(matrix, centred)
    order = np.argsort(-np.abs(lasso.coef_), kind="stable")[:most]
    kept = [int(column) for column in order if lasso.coef_[column]]
    weights, errors = _fit(matrix[:, kept], centred)
    strong = np.abs(weights) > SIGNIFICANT * errors + 1e-9 * np.abs(centred).max()
    kept = [column for column, is_strong in zip(kept, strong, strict=True) if is_strong]
    weights, _ = _fit(matrix[:, kept], centred)
    return [ordered[kept[at]] for at in np.argsort(-np.abs(weights), kind="stable")]


def _fit(features: Array, values: Array) -> tuple[Array, Array]:
    """Return the least-squares weights of features, and their standard errors."""
    design = np.column_stack([features, np.ones(len(values))])
    inverse = np.linalg.pinv(design)
    weights = inverse @ values
    free = max(len(values) - design.shape[1], 1)
    variance = np.square(values - design @ weights).sum() / free
    errors = np.sqrt(variance * np.square(inverse).sum(axis=1))
    return weights[:-1], errors[:-1]


def _terms(parameters: Sequence[int], degree: int) -> list[Array]:
    """Return the terms of each degree, as rows of numbers of functions.

    The degree is lowered where there are more than MAX_TERMS.

    Args:
        parameters: Parameter of each function, in ascending order.
        degree: Largest number of parameters in a term.
    """
    of = np.array(parameters)
    found = [np.arange(len(of))[:, None]]
    while len(found) < min(degree, len(set(parameters))):
        last = found[-1]
        after = np.searchsorted(of, of[last[:, -1]], side="right")  # functions of later parameters
        counts = len(of) - after
        if sum(map(len, found)) + counts.sum() > MAX_TERMS:
            break
        begins = np.repeat(after - np.concatenate([[0], counts.cumsum()[:-1]]), counts)
        following = np.arange(counts.sum()) + begins
        found.append(np.column_stack([np.repeat(last, counts, axis=0), following]))
    return found


def _evaluate(points: Array, term: Term, sizes: Sequence[int]) -> Array:
    """Return the values of a term at points (one row each)."""
    product = np.ones(len(points))
    for parameter, function in term:
        product *= _functions(sizes[parameter])[function][points[:, parameter]]
    return product


@functools.cache
def _functions(size: int) -> Array:
    """Return ``size - 1`` functions of a choice, orthonormal to each other and to the constant.

    Shape (size - 1, size). These are Helmert's contrasts; for two choices, 1 and -1.
    """
    rows = np.zeros((size - 1, size))
    for row in range(size - 1):
        rows[row, : row + 1], rows[row, row + 1] = 1.0, -(row + 1.0)
    norms = np.sqrt(np.square(rows).mean(axis=1, keepdims=True))
    functions: Array = rows / norms
    return functions
