"""Harmonica finds the terms of a sparse polynomial, and needs far fewer points than random."""

import itertools
import json
from pathlib import Path

import numpy as np
import optuna
import pytest
import vizier_results

from paceline.study.tune.searches.harmonica import (
    HarmonicaSampler,
    _functions,
    _terms,
    largest_terms,
    smallest_of_terms,
)

optuna.logging.set_verbosity(optuna.logging.WARNING)
VARIABLES = 60
# Sparse functions of Booleans: variables of each term, and its weight.
TERMS = {(3, 17): 4.0, (5,): 2.5, (10, 11, 15): 3.0, (8, 22): -2.0, (20,): 1.5}
MANY = {(7 * i % 60, (11 * i + 5) % 60): (-1.0) ** i for i in range(1, 17)}


def sparse(bits, terms=TERMS):
    signs = 1 - 2 * np.asarray(bits)
    return sum(weight * np.prod(signs[list(of)]) for of, weight in terms.items())


def test_functions_of_a_choice_are_orthonormal():
    for size in (2, 3, 5):
        functions = np.vstack([np.ones(size), _functions(size)])
        assert functions @ functions.T / size == pytest.approx(np.eye(size))
    assert _functions(2).tolist() == [[1, -1]]


def test_largest_terms_of_a_sparse_function_are_found():
    points = np.random.default_rng(0).integers(0, 2, (150, 24))
    values = np.array([sparse(point) for point in points])
    found = largest_terms(points, values, [2] * 24, 3, 5)
    assert [tuple(parameter for parameter, _ in term) for term in found] == sorted(
        TERMS, key=lambda of: -abs(TERMS[of])
    )


def study_of(sampler, value, trials, direction="minimize"):
    study = optuna.create_study(sampler=sampler, direction=direction)
    study.optimize(value, trials)
    return study


@pytest.mark.long
@pytest.mark.parametrize("sign", [1, -1])
def test_300_points_are_better_than_3000_random_ones(sign):
    def value(trial):
        bits = [trial.suggest_categorical(f"x{i}", [False, True]) for i in range(VARIABLES)]
        return sign * sparse(bits, MANY)

    sampler = HarmonicaSampler(seed=3, samples=140, degree=2)
    direction = "minimize" if sign == 1 else "maximize"
    found = sign * study_of(sampler, value, 300, direction).best_value
    drawn = np.random.default_rng(1).integers(0, 2, (3000, VARIABLES))
    assert found < min(sparse(bits, MANY) for bits in drawn)


def test_choices_of_several_kinds_and_numbers_are_searched_together():
    kinds = ["a", "b", "c"]

    def value(trial):
        x, y = (trial.suggest_categorical(name, kinds) for name in "xy")
        z, rate = trial.suggest_categorical("z", [1, 2]), trial.suggest_float("rate", 0, 1)
        return (x != "b" or y != "c") + 0.2 * (z == 2) + 0.1 * rate

    study = study_of(HarmonicaSampler(seed=0, samples=30, stages=1), value, 60)
    assert {name: study.best_params[name] for name in "xyz"} == {"x": "b", "y": "c", "z": 1}
    assert all(0 <= trial.params["rate"] <= 1 for trial in study.trials)


def test_what_is_found_depends_only_on_the_study():
    terms = {(1, 4): 2.0, (0,): -1.0}

    def value(trial):
        return sparse([trial.suggest_categorical(f"x{i}", [0, 1]) for i in range(8)], terms)

    study = study_of(HarmonicaSampler(seed=3, samples=20), value, 45, "maximize")
    space = {f"x{i}": optuna.distributions.CategoricalDistribution((0, 1)) for i in range(8)}
    first, again = (HarmonicaSampler(seed=s, samples=20).restrictions(study, space) for s in (3, 9))
    assert first == again
    assert dict(first) == {("x1", "x4"): ((0, 0), (1, 1)), ("x0",): ((1,),)}
    assert study.best_value == 3.0


def test_constant_values_fix_nothing():
    def value(trial):
        return float(all(trial.suggest_categorical(f"x{i}", [0, 1]) >= 0 for i in range(4)))

    study = study_of(HarmonicaSampler(seed=0, samples=8), value, 40)
    points = {tuple(trial.params.values()) for trial in study.trials}
    assert len(points) > 8


def test_arguments_below_one_are_refused():
    for name in ("samples", "stages", "degree", "terms"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1; it is 0"):
            HarmonicaSampler(**{name: 0})


def test_terms_up_to_a_degree_are_complete():
    parameters = [0, 1, 1, 2, 3, 3, 3]
    for degree in (1, 2, 3):
        found = [tuple(row) for rows in _terms(parameters, degree) for row in rows.tolist()]
        assert sorted(found) == sorted(
            chosen
            for order in range(1, degree + 1)
            for chosen in itertools.combinations(range(7), order)
            if len({parameters[n] for n in chosen}) == order
        )
    assert sum(map(len, _terms(list(range(60)), 3))) == 60 + 1770 + 34220
    assert len(_terms(list(range(200)), 3)) == 2  # more than MAX_TERMS


@pytest.mark.parametrize("number", range(vizier_results.PROBLEMS))
def test_the_result_is_that_of_google_vizier(number):
    """Vizier's designer has Booleans only: the same variables matter, with the same values."""
    vizier = json.loads(Path(vizier_results.__file__).with_suffix(".json").read_text())[number]
    terms, degree, points, values = vizier_results.problem(number)
    data = tuple(
        (tuple(point), -value) for point, value in zip(points.tolist(), values, strict=True)
    )
    found = smallest_of_terms(data, (2,) * points.shape[1], degree, len(terms))
    assert sorted(itertools.chain(*(of for of, _ in found))) == vizier["variables"]
    best = dict(zip(vizier["variables"], vizier["values"], strict=True))
    for variables, assignments in found:
        assert tuple(best[one] for one in variables) in assignments
