"""Charts of a study of ``paceline tune`` on a page.

They are the figures of Optuna's visualization (history, parallel coordinates, importances, learning
curves, Pareto front), with rungs and lineage, drawn by the part of plotly.js that all pages share:
Optuna's own functions need all of plotly.js, which is four times as large as a whole page.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from .tuning_document import parameter_text, parameters_text, value_text
from .tuning_view import COMPLETE, MAX, TrialRow, TuningView

MAX_LINES = 400  # of trials in parallel coordinates
MAX_CURVES = 60
MAX_POINTS = 2000
TICKS = 4  # of a range


def tuning_charts(view: TuningView) -> dict[str, Any]:
    """Return the data of the charts that the study has.

    Raises:
        ValueError: No trial has a value yet.
    """
    if not any(row.values or row.last is not None for row in view.rows):
        raise ValueError(f"the study {view.name} has no trial with a value yet")
    found: dict[str, Any] = {}
    complete = [row for row in view.rows if row.state == COMPLETE and _finite(row.values)]
    if len(view.metrics) == 1 and complete:
        found["history"] = _history(view, complete)
    scored = complete or [row for row in view.rows if row.last is not None]
    if scored and view.parameters:
        found["parallel"] = _parallel(view, scored)
    if view.importances:
        ranked = sorted(view.importances.items(), key=lambda item: -item[1])
        found["importances"] = {"names": [k for k, _ in ranked], "values": [v for _, v in ranked]}
    if curves := _curves(view):
        found["curves"] = _curve_data(view, curves[:MAX_CURVES])
    if len(view.metrics) > 1 and complete:
        found["pareto"] = _pareto(view, complete)
    if any(row.parent is not None for row in view.rows):
        found["lineage"] = _lineage(view)
    return found


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _history(view: TuningView, complete: list[TrialRow]) -> dict[str, Any]:
    """Return the values in the order of the trials, and the best one until each."""
    shown = complete[-MAX_POINTS:]
    best = max if view.goals[0] == MAX else min
    until = list(accumulate((row.values[0] for row in complete), best))[-MAX_POINTS:]
    return {
        "metric": view.metrics[0],
        "numbers": [row.number for row in shown],
        "values": [row.values[0] for row in shown],
        "best": until,
        "text": [parameters_text(row) for row in shown],
    }


def _score(row: TrialRow) -> float:
    return row.values[0] if row.values else row.last or 0.0


def _parallel(view: TuningView, rows: list[TrialRow]) -> dict[str, Any]:
    """Return lines over axes from 0 to 1: the parameters, and the metrics last."""
    sign = -1 if view.goals[0] == MAX else 1
    rows = sorted(
        (row for row in rows if math.isfinite(_score(row))), key=lambda row: sign * _score(row)
    )
    rows = rows[:MAX_LINES]
    axes, places = [], []
    for name in view.parameters:
        axis, at = _axis(name, [row.parameters.get(name) for row in rows])
        axes.append(axis)
        places.append(at)
    for number, name in enumerate(view.metrics):
        values = [row.values[number] if row.values else _score(row) for row in rows]
        axis, at = _axis(name, values)
        axes.append(axis)
        places.append(at)
    scores = places[len(view.parameters)]
    return {
        "axes": axes,
        "good": 1 if view.goals[0] == MAX else 0,
        "lines": [
            {
                "trial": row.number,
                "y": [at[i] for at in places],
                "score": scores[i],
                "best": row.number in view.best,
            }
            for i, row in enumerate(rows)
        ],
    }


def _axis(name: str, values: Sequence[Any]) -> tuple[dict[str, Any], list[float | None]]:
    """Return an axis with its ticks, and the place of each value on it; None if it has none."""
    known = [value for value in values if value is not None]
    is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)
    if not is_number or len(set(known)) < 2:
        kinds = sorted(set(map(parameter_text, known)))
        of = {kind: i / max(len(kinds) - 1, 1) for i, kind in enumerate(kinds)}
        ticks = [[of[kind], kind] for kind in kinds[:20]]
        places = [None if v is None else of[parameter_text(v)] for v in values]
        return {"name": name, "ticks": ticks}, places
    low, high = float(min(known)), float(max(known))
    is_log = low > 0 and high / low > 30

    def place(value: float) -> float:
        if is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    ticks = []
    for number in range(TICKS + 1):
        share = number / TICKS
        value = low * (high / low) ** share if is_log else low + share * (high - low)
        ticks.append([share, f"{value:.3g}"])
    return {"name": name, "ticks": ticks}, [None if v is None else place(float(v)) for v in values]


def _curves(view: TuningView) -> list[TrialRow]:
    """Return the trials with several values on the way, the best ones first."""
    sign = -1 if view.goals[0] == MAX else 1
    rows = [row for row in view.rows if len(row.intermediate) > 1 or row.parent is not None]
    return sorted(rows, key=lambda row: (row.last is None, sign * (row.last or 0.0), row.number))


def _curve_data(view: TuningView, rows: list[TrialRow]) -> dict[str, Any]:
    lines = []
    for row in rows:
        points = sorted(row.intermediate.items())
        if row.parent is not None and points:  # from the end of its parent
            before = view.rows[row.parent].intermediate
            points = [*((s, v) for s, v in before.items() if s == row.first_step), *points]
        points = [point for point in points if math.isfinite(point[1])]
        lines.append(
            {
                "name": f"trial {row.number}",
                "x": [step for step, _ in points],
                "y": [value for _, value in points],
                "state": row.failure or row.state,
                "best": row.number in view.best,
            }
        )
    return {"metric": view.metrics[0], "lines": lines, "rungs": _rungs(view)}


def _rungs(view: TuningView) -> list[int]:
    """Return the steps at which trials of this study were decided on: rungs, or generations."""
    found = {row.first_step for row in view.rows if row.first_step}
    for row in view.rows:
        if row.rung and row.step is not None and row.state != COMPLETE:
            found.add(row.step)
    return sorted(found)


def _pareto(view: TuningView, complete: list[TrialRow]) -> dict[str, Any]:
    """Return the first two metrics of each trial."""
    shown = complete[-MAX_POINTS:]
    return {
        "metrics": list(view.metrics[:2]),
        "x": [row.values[0] for row in shown],
        "y": [row.values[1] for row in shown],
        "best": [row.number in view.best for row in shown],
        "text": [f"trial {row.number}: {parameters_text(row)}" for row in shown],
    }


def _lineage(view: TuningView) -> dict[str, Any]:
    """Return each trial of a population as a line from its parent, by member."""
    place: dict[int, int] = {}
    counts: dict[int, int] = {}
    for row in view.rows:
        generation = row.generation or 0
        place[row.number] = counts.get(generation, 0)
        counts[generation] = place[row.number] + 1
    ancestors = set()
    if len(view.best) == 1:
        ancestors = {row.number for row in view.ancestry(view.best[0])}
    metric = view.metrics[0]
    scores = {row.number: f"{metric} {value_text(row.last)}" for row in view.rows}
    return {
        "points": [
            {
                "x": row.generation or 0,
                "y": place[row.number],
                "text": f"trial {row.number}: {scores[row.number]}: {parameters_text(row)}",
                "best": row.number in ancestors,
                "failed": bool(row.failure),
            }
            for row in view.rows
        ],
        "edges": [
            {
                "x": [(view.rows[row.parent].generation or 0), row.generation or 0],
                "y": [place[row.parent], place[row.number]],
                "best": row.number in ancestors,
            }
            for row in view.rows
            if row.parent is not None and row.parent in place
        ],
    }
