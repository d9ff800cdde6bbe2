"""The run of ``paceline diagnose`` that profiles the operators of a few steps."""

import math
from pathlib import Path

from ...analyze.records.operator_file import OperatorFiles, read_operator_files
from ...record.experiments.rung import EVERYTHING, PROFILED_STEPS, Rung
from .plan import MIN_STEPS_SHORT_RUN, RoundCost
from .run_script import FailedError, OutOfTimeError, Runner

STEPS_BEFORE = 10  # measured steps before the profile
TIME_SHARE = 0.2  # of the time left, at most, for this run
SLOWDOWN = 5.0  # expected, of a step whose operators are profiled
LIMIT_FACTOR, MIN_LIMIT_S = 5.0, 60.0  # of the expected duration; then the run counts as failed


def profile_operators(runner: Runner, cost: RoundCost, script_steps: int | None) -> OperatorFiles:
    """Profile the operators of a few steps of all ranks, if there is time for it.

    No failure of this run ends the diagnosis.

    Args:
        runner: Runs the script.
        cost: Cost of a run with one phase.
        script_steps: Number of steps of the script; None if it has more than those of a first run.

    Raises:
        InterruptedRunError: The user interrupted the run.
    """
    warm, steps = runner.asked.warming, runner.asked.steps or STEPS_BEFORE
    left_s, most = TIME_SHARE * runner.deadline.left_s, script_steps or math.inf
    profile_s = SLOWDOWN * PROFILED_STEPS * cost.step_s
    if cost.duration_s(warm + steps) + profile_s > left_s or warm + steps + PROFILED_STEPS > most:
        warm, steps = 1, MIN_STEPS_SHORT_RUN
    expected_s = cost.duration_s(warm + steps) + profile_s
    if expected_s > left_s:
        note = "there is no time to profile the operators. HINT: increase --minutes"
        return OperatorFiles([], [note])
    rung = Rung(warm, steps, (EVERYTHING,), profiles=True)
    named = f"the operators of {PROFILED_STEPS} steps"
    try:
        limit_s = max(MIN_LIMIT_S, LIMIT_FACTOR * expected_s)
        run = runner.run(False, rung, named=named, limit_s=limit_s)
    except FailedError as failed:
        note = f"the script fails while its operators are profiled: {failed.short}"
        return OperatorFiles([], [note])
    except OutOfTimeError:
        return OperatorFiles([], ["profiling the operators takes too long"])
    files, notes = read_operator_files(Path(run.name))
    failures = [record.meta.get("rung", {}).get("profile_failure") for record in run.records]
    notes += dict.fromkeys(f"the operators were not profiled: {one}" for one in failures if one)
    if not files and not notes:
        notes = ["the operators were not profiled: the script ends after its first steps"]
    return OperatorFiles(files, notes)
