"""The view of a study in its journal."""

import random
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...report.tuning.advice import batch_notes, wait_notes
from ...report.tuning.tuning_view import (
    COMPLETE,
    FAILED,
    PAUSED,
    RUNNING,
    STOPPED,
    WAITING,
    TrialRow,
    TuningView,
)
from .open_study import COPIED, OpenStudy
from .searches.gain import search_gain
from .searches.registry import make_search
from .searches.search import FAILURE, KNOWN, RUN_FIGURES, Search
from .study_file import StudySpec

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

STATES = {
    "COMPLETE": COMPLETE,
    "PRUNED": STOPPED,
    "FAIL": FAILED,
    "WAITING": WAITING,
    "RUNNING": RUNNING,
}
MIN_FOR_IMPORTANCES, MAX_FOR_IMPORTANCES = 8, 1000  # complete trials


def trial_row(trial: "FrozenTrial", search: Search) -> TrialRow:
    """Return the row of a trial of the journal."""
    attributes = trial.user_attrs
    failure, figures = attributes.get(FAILURE, {}), attributes.get(RUN_FIGURES, {})
    state = STATES[trial.state.name]
    if state == RUNNING and search.is_paused(trial):
        state = PAUSED
    step = trial.last_step
    last = trial.intermediate_values[step] if step is not None else None
    values = tuple(trial.values or ()) if state == COMPLETE else ()
    generation, parent = search.lineage(trial)
    return TrialRow(
        trial.number,
        state,
        dict(trial.params),
        values,
        values[0] if values and last is None else last,
        step,
        search.rung_of(trial),
        int(figures.get("ranks", 1)),
        float(figures.get("seconds", 0.0)),
        float(figures.get("node_hours", 0.0)),
        str(failure.get("kind", "")),
        str(failure.get("text", "")).partition("\n")[0],
        bool(attributes.get(KNOWN)),
        trial.datetime_start.timestamp() if trial.datetime_start else None,
        dict(trial.intermediate_values),
        search.first_step(trial),
        generation,
        parent,
        str(figures.get("waits", {}).get("kind", "")),
        float(figures.get("waits", {}).get("share", 0.0)),
        tuple(figures.get("noise", ())),
    )


def best_numbers(study: "Study", rows: Sequence[TrialRow]) -> list[int]:
    """Return the numbers of the best complete trials: one, or the Pareto front."""
    complete = [row for row in rows if row.state == COMPLETE]
    if not complete:
        return []
    if len(study.directions) > 1:
        return sorted(one.number for one in study.best_trials)
    sign = -1 if study.direction.name == "MAXIMIZE" else 1
    return [min(complete, key=lambda row: (sign * row.values[0], row.number)).number]


def study_view(opened: OpenStudy, rows: list[TrialRow], best: list[int]) -> TuningView:
    """Return the view of a study of which the rows and the best trials are known."""
    table = opened.spec.table
    pruner = f", {table.pruner}" if table.pruner != "none" else ""
    return TuningView(
        opened.study.study_name,
        str(opened.journal),
        opened.spec.metrics,
        opened.spec.goals,
        rows,
        best,
        table.trials,
        table.command or table.function or "",
        best_command(opened.spec, rows, best),
        table.search + pruner,
        notes=[*wait_notes(rows), *batch_notes(rows)],
    )


def read_view(opened: OpenStudy, with_importances: bool = True) -> TuningView:
    """Return the view of a study in its journal. The importances take seconds."""
    search = make_search(opened.study, opened.spec)
    rows = [trial_row(one, search) for one in opened.study.get_trials(deepcopy=False)]
    importances, note = _importances(opened.study, rows) if with_importances else ({}, "")
    view = study_view(opened, rows, best_numbers(opened.study, rows))
    trials = opened.study.get_trials(deepcopy=False)
    copied = {one.number for one in trials if COPIED in one.user_attrs}
    gain = search_gain(opened.spec, rows, copied) if with_importances else None
    return replace(view, importances=importances, importance_note=note, gain=gain)


def best_command(spec: StudySpec, rows: list[TrialRow], best: list[int]) -> str:
    """Return the command of the best trial, without ``paceline run``; "" if there is none.

    A trial that began from the checkpoint of another one has none: its parameters have changed. One
    with knobs needs a settings file.
    """
    if len(best) != 1 or spec.command.function:
        return ""
    row = rows[best[0]]
    if row.generation is not None or spec.knobs(row.parameters):
        return ""
    own = {
        "checkpoint": "checkpoint",
        "folder": ".",
        "trial": str(row.number),
        "seed": str(spec.table.seed),
        "ranks": str(row.ranks),
        "epochs": str(spec.table.epochs),
    }
    return f"-n {row.ranks} {shlex.join(spec.command.words(row.parameters, own))}"


def _importances(study: "Study", rows: list[TrialRow]) -> tuple[dict[str, float], str]:
    """Return the importance of each parameter (functional ANOVA), or why there is none."""
    import optuna

    complete = sum(row.state == COMPLETE for row in rows)
    if len(study.directions) > 1:
        return {}, ""
    if any(row.generation is not None for row in rows):
        return {}, "values of different generations can't be compared, so there are no importances"
    if complete < MIN_FOR_IMPORTANCES:
        return {}, f"importances need {MIN_FOR_IMPORTANCES} complete trials; there are {complete}"
    note = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if complete > MAX_FOR_IMPORTANCES:
                study = _part_of(study, MAX_FOR_IMPORTANCES)
                note = f"of {MAX_FOR_IMPORTANCES:,} of the trials"
            found = optuna.importance.get_param_importances(
                study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
            )
    except ImportError:
        return {}, "importances need scikit-learn. HINT: pip install 'paceline[tune]'"
    except (ValueError, RuntimeError) as error:
        return {}, f"importances can't be determined: {error}"
    return {name: float(value) for name, value in found.items()}, note


def _part_of(study: "Study", count: int) -> "Study":
    """Return a study in memory with some of the complete trials, drawn at random."""
    import optuna

    trials = [one for one in study.get_trials(deepcopy=False) if one.state.name == "COMPLETE"]
    part = optuna.create_study(direction=study.direction)
    part.add_trials(random.Random(0).sample(trials, count))
    return part
