"""What a search has gained over random points at the same budget.

Every sampler but the grid draws its first points at random. These are compared with the points that
the search chose: the expected best value of ``n`` trials, drawn from the ones or from the others,
where ``n`` is half of the smaller group. (More trials than there are can't be predicted without a
model, and the best value of all trials has no interval.) The interval is that of the bootstrap over
trials. A gain is stated if its interval excludes zero, and if a permutation of the two groups
changes the difference of their mean ranks by less in 95 % of the cases.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....report.tuning.tuning_view import COMPLETE, MAX, SearchGain, TrialRow
from ..study_file import StudySpec
from .registry import random_trials

MIN_TRIALS = 8  # in each group
RESAMPLES, LEVEL = 4000, 0.95
MAX_TRIALS = 500  # in each group: of more, the first ones

Values = npt.NDArray[np.float64]


def search_gain(spec: StudySpec, rows: Sequence[TrialRow], copied: set[int]) -> SearchGain:
    """Return what a study has gained, or why that can't be told.

    Args:
        spec: The study file.
        rows: All trials.
        copied: Numbers of trials of another study, whose sampler is not known.
    """
    if len(spec.metrics) > 1:
        return SearchGain("several metrics have no single best value")
    if any(row.generation is not None for row in rows):
        return SearchGain(
            "the first generation of a population is random, and no random point was trained to "
            "its end"
        )
    if spec.table.pruner != "none":
        return SearchGain(_saved_steps(spec, rows))
    at_random = random_trials(spec, len(rows))
    groups: tuple[list[float], list[float]] = ([], [])
    for row in rows:
        if row.state == COMPLETE and row.number not in copied and not row.known:
            groups[row.number not in at_random].append(row.values[0])
    random, searched = groups
    if min(len(random), len(searched)) < MIN_TRIALS:
        return SearchGain(
            f"complete trials: {len(random)} at random and {len(searched)} searched; it needs "
            f"{MIN_TRIALS} of each"
        )
    return compare(random[:MAX_TRIALS], searched[:MAX_TRIALS], spec.goals[0] == MAX)


def _saved_steps(spec: StudySpec, rows: Sequence[TrialRow]) -> str:
    """Return why a search with a pruner can't be compared, and the steps that it saved."""
    reason = "points that were stopped have no final value"
    begun = sum(row.step is not None for row in rows)
    whole, trained = begun * (spec.table.epochs or 0), sum(row.steps for row in rows)
    if not trained or whole <= trained:
        return reason
    return f"{reason}. It trained {trained:,} of the {whole:,} steps of {begun} whole trials"


def compare(random: Sequence[float], searched: Sequence[float], is_max: bool) -> SearchGain:
    """Return the gain of the searched trials over the random ones.

    Args:
        random, searched: Their values, at least ``MIN_TRIALS`` each.
        is_max: Whether large values are good.
    """
    sign = 1.0 if is_max else -1.0
    first, second = (sign * np.array(values, np.float64) for values in (random, searched))
    count = min(len(first), len(second)) // 2
    draw = np.random.default_rng(0)
    found = _best(second, count) - _best(first, count)
    means = [_best(_resampled(values, draw), count) for values in (second, first)]
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(means[0] - means[1], [tail, 100 - tail])
    differs = _permutation_tail(first, second, draw) < 1 - LEVEL
    return SearchGain(
        "",
        count,
        len(first),
        len(second),
        sign * float(_best(first, count)),
        sign * float(_best(second, count)),
        float(found),
        float(low),
        float(high),
        differs and bool(low > 0 or high < 0),
    )


def _best(values: Values, count: int) -> Any:
    """Return the expected best of ``count`` of the values, along the last axis."""
    total = values.shape[-1]
    # Probability that the i-th smallest value is the largest one of those that are drawn.
    weights = [math.comb(i, count - 1) / math.comb(total, count) for i in range(total)]
    return np.sort(values, axis=-1) @ np.array(weights)


def _resampled(values: Values, draw: np.random.Generator) -> Values:
    resampled: Values = values[draw.integers(0, len(values), (RESAMPLES, len(values)))]
    return resampled


def _permutation_tail(first: Values, second: Values, draw: np.random.Generator) -> float:
    """Return how often a random division differs at least as much as that in two groups."""
    ranks = _ranks(np.concatenate([first, second]))
    measured = abs(ranks[len(first) :].mean() - ranks.mean())
    orders = draw.permuted(np.tile(ranks, (RESAMPLES, 1)), axis=1)
    found = np.abs(orders[:, len(first) :].mean(axis=1) - ranks.mean())
    return float((1 + (found >= measured - 1e-9).sum()) / (1 + RESAMPLES))


def _ranks(values: Values) -> Values:
    """Return the rank of each value; equal ones have their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last: Values = np.cumsum(counts).astype(np.float64)
    return (last - (counts - 1) / 2)[inverse]
