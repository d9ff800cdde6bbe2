"""The view of a study in its journal."""

import math
import random
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...report.tuning.tuning_document import batch_notes, wait_notes
from ...report.tuning.tuning_view import (
    COMPLETE,
    FAILED,
    MAX,
    PAUSED,
    RUNNING,
    STOPPED,
    WAITING,
    SearchGain,
    TrialRow,
    TuningView,
)
from .open_study import COPIED, OpenStudy
from .searches.registry import make_search, random_trials
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


# What a search has gained over random points at the same budget.
#
# Every sampler but the grid draws its first points at random. These are compared with the points
# that the search chose: the expected best value of ``n`` trials, drawn from the ones or from the
# others, where ``n`` is half of the smaller group. (More trials than there are can't be predicted
# without a model, and the best value of all trials has no interval.) The interval is that of the
# bootstrap over trials. A gain is stated if its interval excludes zero, and if a permutation of
# the two groups changes the difference of their mean ranks by less in 95 % of the cases.

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
        return sorted(trial.number for trial in study.best_trials)
    sign = -1 if study.direction.name == "MAXIMIZE" else 1
    return [min(complete, key=lambda row: (sign * row.values[0], row.number)).number]


class StudyRows:
    """The rows of a study's trials, by number, as they are in its journal.

    Attributes:
        by_number: The rows.
        best: Numbers of the best complete trials.
    """

    def __init__(self, opened: OpenStudy, search: Search) -> None:
        self._opened, self._search = opened, search
        self.read()

    def read(self) -> None:
        """Read all rows again."""
        trials = self._opened.study.get_trials(deepcopy=False)
        self.by_number = [trial_row(trial, self._search) for trial in trials]
        self.best = best_numbers(self._opened.study, self.by_number)

    def refresh(self, number: int) -> TrialRow:
        """Read the row of a trial again."""
        trials = self._opened.study.get_trials(deepcopy=False)
        for trial in trials[len(self.by_number) :]:
            self.by_number.append(trial_row(trial, self._search))
        row = self.by_number[number] = trial_row(trials[number], self._search)
        if row.state == COMPLETE:
            several = len(self._opened.spec.metrics) > 1
            rows = self.by_number if several else [*map(self.by_number.__getitem__, self.best), row]
            self.best = best_numbers(self._opened.study, rows)
        return row

    def view(self) -> TuningView:
        """Return the current view of the study; its rows change with the study."""
        spec, table = self._opened.spec, self._opened.spec.table
        pruner = f", {table.pruner}" if table.pruner != "none" else ""
        return TuningView(
            self._opened.study.study_name,
            str(self._opened.journal),
            spec.metrics,
            spec.goals,
            self.by_number,
            self.best,
            table.trials,
            table.command or table.function or "",
            best_command(spec, self.by_number, self.best),
            table.search + pruner,
            notes=[*wait_notes(self.by_number), *batch_notes(self.by_number)],
        )


def read_view(opened: OpenStudy, with_importances: bool = True) -> TuningView:
    """Return the view of a study in its journal. The importances take seconds."""
    view = StudyRows(opened, make_search(opened.study, opened.spec)).view()
    if not with_importances:
        return view
    importances, note = _importances(opened.study, view.rows)
    trials = opened.study.get_trials(deepcopy=False)
    copied = {trial.number for trial in trials if COPIED in trial.user_attrs}
    gain = search_gain(opened.spec, view.rows, copied)
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


def _importances(study: "Study", rows: Sequence[TrialRow]) -> tuple[dict[str, float], str]:
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

    trials = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    part = optuna.create_study(direction=study.direction)
    part.add_trials(random.Random(0).sample(trials, count))
    return part
