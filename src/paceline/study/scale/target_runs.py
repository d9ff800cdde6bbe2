"""Runs of a scaling study that train until a target (``paceline scale --until``)."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...analyze.records.load_run import Run
from ...analyze.reference.goal import Goal, parse_goal
from ...analyze.reference.reference_file import RECORD_FILE, read_reference
from ...analyze.reference.series import Series
from ...analyze.scaling.study_model import Setup, StudyRequest, TargetResult
from ...record.ring.states import State
from ...record.watch.seed_shift import VARIABLE as SEED_SHIFT
from ..reference.make_reference import SEED

NS = 1e-9


def target_options(request: StudyRequest, seed: int) -> list[str]:
    """Return the options of ``paceline run`` for a run with this seed; none without a target.

    The launcher ends the run when the target is reached. A script without {seed} in its arguments
    gets another seed by ``PACELINE_SEED_SHIFT``.
    """
    if not request.until:
        return []
    metric = request.metric or parse_goal(request.until).name
    words = ["--metric", metric, "--until", request.until]
    if not any(SEED in word for word in request.args):
        words += ["--env", f"{SEED_SHIFT}={seed}"]
    return words


def target_result(
    request: StudyRequest, record: Path, run: Run | None, setup: Setup
) -> TargetResult | None:
    """Return how a run ended; None without a target.

    Args:
        record: Folder of the record, which also holds the values of the metric.
        run: The record; None if it can't be read.
        setup: Its global batch counts the samples if the job did not.

    Raises:
        ValueError: The values can't be read.
    """
    if not request.until:
        return None
    goal = parse_goal(request.until, request.metric or None)
    ends = _step_ends(run)
    last = max(ends, default=0)
    samples, seconds = last * setup.global_batch, ends.get(last, 0.0)
    missed = TargetResult(str(goal), False, None, last, samples, seconds)
    if not (record / RECORD_FILE).exists():
        return missed
    return _from_values(goal, read_reference(record).runs[0], missed, ends, setup)


def _from_values(
    goal: Goal, values: Series, missed: TargetResult, ends: dict[int, float], setup: Setup
) -> TargetResult:
    rate = values.peak_rate if math.isfinite(values.peak_rate) else None
    best = goal.best(float(value) for value in values.values)
    missed = replace(missed, best=best, learning_rate=rate)
    reached = [at for at, value in enumerate(values.values) if goal.is_reached(float(value))]
    if not reached:
        return missed
    at = reached[0]
    step = int(values.steps[at])
    counted = values.samples[at]
    samples = int(counted) if np.isfinite(counted) and counted > 0 else step * setup.global_batch
    seconds = ends.get(step, missed.seconds)
    return replace(missed, reached=True, steps=step, samples=samples, seconds=seconds)


def _step_ends(run: Run | None) -> dict[int, float]:
    """Return when each step of the first rank ended, in s from the start of its first step."""
    if run is None or not run.records:
        return {}
    first = min(run.records, key=lambda record: record.rank)
    events = first.events_in(State.STEP)
    if not len(events):
        return {}
    start = int(events["start"].min())
    return {int(row["step"]): (int(row["end"]) - start) * NS for row in events}
