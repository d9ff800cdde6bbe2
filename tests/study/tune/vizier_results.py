"""Results of Google Vizier's Harmonica for Booleans, with which ``HarmonicaSampler`` is compared.

    python -m venv /tmp/vizier && /tmp/vizier/bin/pip install 'google-vizier[jax]' scikit-learn
    /tmp/vizier/bin/python tests/study/tune/vizier_results.py > tests/study/tune/vizier_results.json

The problems are sparse functions of Booleans, drawn from their number, so that only Vizier's
answers are stored: the variables that its designer found to matter, and their best values.
"""

import json

import numpy as np

PROBLEMS, SAMPLES = 20, 150


def problem(number):
    """Return variables by weight of the terms of a function, and points with their values.

    Odd ones have noise. A point is a row of 0 and 1; a term is the product of 1 for 1 and -1 for 0.
    """
    draw = np.random.default_rng(number)
    count, degree = int(draw.integers(8, 15)), 2 + number % 2
    terms = {}
    weights = 4.0 * 0.7 ** np.arange(3 + number % 3)
    while len(terms) < len(weights):
        size = int(draw.integers(1, degree + 1))
        of = tuple(sorted(int(one) for one in draw.choice(count, size, replace=False)))
        terms.setdefault(of, float(weights[len(terms)] * draw.choice([-1.0, 1.0])))
    points = draw.integers(0, 2, (SAMPLES, count))
    values = value_of(points, terms)
    if number % 2:
        values = values + 0.1 * draw.standard_normal(SAMPLES)
    return terms, degree, points, values


def value_of(points, terms):
    signs = 2.0 * np.asarray(points) - 1.0
    return sum(weight * signs[:, list(of)].prod(axis=1) for of, weight in terms.items())


def main():
    from vizier import algorithms, pyvizier
    from vizier._src.algorithms.designers import harmonica

    found = []
    for number in range(PROBLEMS):
        terms, degree, points, values = problem(number)
        statement = pyvizier.ProblemStatement()
        for variable in range(points.shape[1]):
            statement.search_space.root.add_bool_param(f"x{variable}")
        metric = pyvizier.MetricInformation("y", goal=pyvizier.ObjectiveMetricGoal.MAXIMIZE)
        statement.metric_information.append(metric)
        recovery = harmonica.PolynomialSparseRecovery(
            d=degree, num_top_monomials=len(terms), alpha=0.05
        )
        stage = harmonica.HarmonicaQ(psr=recovery, q=1, t=1)
        designer = harmonica.HarmonicaDesigner(statement, stage)
        trials = []
        for at, (point, value) in enumerate(zip(points, values, strict=True)):
            parameters = {f"x{i}": "True" if bit else "False" for i, bit in enumerate(point)}
            trial = pyvizier.Trial(id=at + 1, parameters=parameters)
            trial.complete(pyvizier.Measurement(metrics={"y": float(value)}))
            trials.append(trial)
        designer.update(algorithms.CompletedTrials(trials), algorithms.ActiveTrials())
        designer.suggest(1)
        # Its suggestion is a random point with these variables at their best values.
        restricted = stage._restricted_surrogate
        best = {
            int(i): int(restricted.X_restrictors[0][i] > 0) for i in restricted.replacement_indices
        }
        found.append({"variables": sorted(best), "values": [best[i] for i in sorted(best)]})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
