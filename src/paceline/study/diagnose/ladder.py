"""Ladder of experiments of ``paceline diagnose``.

The experiments are short runs of the user's script. Each of them disables something from outside
(record/experiments/rung.py). They are repeated in interleaved rounds until the time budget is used.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...analyze.diagnosis.ladder import EndedError, RungResult, measure_rung
from ...analyze.diagnosis.survey import Survey, book_rare, pooled, survey
from ...analyze.records.child_processes import untracked_training
from ...analyze.records.load_run import Run
from ...plurals import counted
from ...record.experiments.rung import (
    CACHED,
    CHANNELS_LAST,
    EVERYTHING,
    LOADER,
    ONE_THREAD,
    SILENT,
    Rung,
)
from .plan import LEAST_STEPS, Plan, RoundCost, first_plan, fit_into_script, next_plan
from .run_figures import loader_totals, split_phases, steps_done, steps_s
from .run_script import (
    MINUTE_S,
    FailedError,
    InterruptedRunError,
    OutOfTimeError,
    Runner,
    RunRequest,
)

FIRST_STEPS = 10  # steps of the first run, which measures the duration of a step
SURVEY_SHARE = 0.25  # of the time budget, at most, for the first run
REPETITIONS = (3, 9)  # minimum and maximum number of rounds
# A run may take this factor of the time that is expected, and at least this time, before it counts
# as failed.
RUN_LIMIT_FACTOR, MIN_RUN_LIMIT_S = 5.0, 60.0
# How a ladder ended.
COMPLETE, OUT_OF_TIME, INTERRUPTED, FAILED = "complete", "out-of-time", "interrupted", "failed"

# Rungs by name: whether only one rank runs, and the phase of its run.
RUNGS = {
    "alone": (True, CACHED),
    "alone, loading": (True, EVERYTHING),
    "alone, channels-last": (True, CHANNELS_LAST),
    "silent": (False, SILENT),
    "one thread": (False, ONE_THREAD),
    "cached": (False, CACHED),
    "everything": (False, EVERYTHING),
}
WORDS = {
    "alone": "one rank, batches in memory",
    "alone, loading": "one rank, everything",
    "alone, channels-last": "one rank, batches in memory, images as channels-last",
    "silent": "all ranks, batches in memory, no communication",
    "one thread": "all ranks, batches in memory, no communication, one thread per rank",
    "cached": "all ranks, batches in memory",
    "everything": "all ranks, everything",
    "loader": "all ranks, loaders only",
}


@dataclass
class Ladder:
    """Results of the ladder of experiments.

    Attributes:
        warm: Warm-up steps of each phase.
        steps: Measured steps of each phase.
        rungs: Results of each rung, one per round.
        run: Last run of all ranks; nothing is switched off from step ``warm`` to ``warm + steps``.
        first: The first run, with all ranks, which precedes the rounds.
        loader: Totals of the loaders when they run without training, or None.
        seconds: Duration of the whole ladder.
        refused: Rungs that could not be run, with the reason.
        notes: Remarks for the user.
        ended: "complete", or why there are fewer rounds than needed: "out-of-time", "interrupted"
            or "failed".
        survey: What happens seldom in the training; None if it could not be seen.
    """

    warm: int
    steps: int
    rungs: dict[str, list[RungResult]]
    run: Run
    first: Run
    loader: dict[str, float] | None = None
    seconds: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ended: str = COMPLETE
    survey: Survey | None = None

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Facts about the script from each rank of the last run (record/experiments/observer.py).

        "exchange" is the backend of the rank's collectives if it is not one of PyTorch, else None.
        """
        metas = [record.meta for record in self.run.records]
        return [meta.get("rung", {}) | {"exchange": meta.get("exchange")} for meta in metas]


def climb_ladder(asked: RunRequest, say: Callable[[str], None]) -> Ladder:
    """Run the ladder until its deadline, or until the user interrupts it.

    Raises:
        ValueError: The script cannot be measured.
        KeyboardInterrupt: The user interrupted it before anything was measured.
    """
    with Runner(asked, say) as runner:
        return _Climb(asked, runner).all()


class _Climb:
    def __init__(self, asked: RunRequest, runner: Runner) -> None:
        self.asked, self.runner, self.began = asked, runner, time.monotonic()
        self.workers = 0  # most workers of a rank's loader
        self.start_s = 0.1  # start-up time of the processes of one run
        self.step_s = 0.0  # of the first run
        self.script_steps: int | None = None  # if the first run reached the script's end
        # The runs of a round: whether one rank runs alone, and the phases. The run of all ranks is
        # first, because it can be evaluated without the other one.
        self.runs: list[tuple[bool, tuple[str, ...]]] = [
            (False, (EVERYTHING, CACHED, SILENT, LOADER)),
            (True, (EVERYTHING, CACHED)),
        ]

    def all(self) -> Ladder:
        found = self._first_run()
        if found.ended == COMPLETE:
            self._run_rounds(found)
        _book_rare(found, self._most_phases())
        found.seconds = time.monotonic() - self.began
        found.notes += self._short_notes(found)
        return found

    def _first_run(self) -> Ladder:
        """Run all ranks once, to measure the duration of a step and inspect the script.

        Its record is the result if no time is left for anything else.
        """
        asked, ended, cut = self.asked, COMPLETE, False
        steps, warm = asked.steps or FIRST_STEPS, asked.warming
        before = time.monotonic()
        until_s = 0.0 if asked.where else self.runner.deadline.part(SURVEY_SHARE).at_s
        rung = Rung(warm, steps, (EVERYTHING,), survey_until=until_s)
        try:
            run = self.runner.run(
                False, rung, asked.count, named=f"{steps} steps, and a survey of what follows"
            )
        except (OutOfTimeError, InterruptedRunError) as early:
            if early.run is None or steps_done(early.run) < 2:
                raise
            run, cut = early.run, True
            ended = INTERRUPTED if isinstance(early, InterruptedRunError) else COMPLETE
        took_s = time.monotonic() - before
        done = steps_done(run)
        if done < warm + steps:
            if done < 2:
                children = untracked_training(run.records)
                raise ValueError(children[0]) if children else EndedError(done, warm + steps)
            warm = min(warm, max(1, done // 3))
            steps = min(steps, done - warm)
        self.step_s = measure_rung(run, warm, steps, EVERYTHING).step_s
        self.start_s = max(took_s - steps_s(run), 0.1)
        self._adapt_to_script(run)
        rungs: dict[str, list[RungResult]] = {
            name: [] for name, kind in RUNGS.items() if self._has(kind)
        }
        found = Ladder(warm, steps, rungs, run, run, ended=ended, survey=survey(run, warm))
        if not cut and done < rung.warm + rung.steps:
            self.script_steps = done
        return found

    def _run_rounds(self, found: Ladder) -> None:
        """Run rounds until the time is over; the results of each are added to ``found``."""
        asked, deadline = self.asked, self.runner.deadline
        if asked.steps:
            plan: Plan | None = Plan(asked.warming, asked.steps)
        else:
            plan = first_plan(
                deadline.left_s, self._cost(), asked.warming, self.workers, REPETITIONS
            )
        if self.script_steps is not None:
            plan = self._fitted(plan, EndedError(self.script_steps, 0), found)
        while plan is not None and _rounds(found) < REPETITIONS[1]:
            turn, before, done = time.monotonic(), len(found.refused), _rounds(found)
            try:
                self._run_round(found, plan)
            except EndedError as ended:
                plan = self._fitted(plan, ended, found)
                continue
            except (OutOfTimeError, KeyboardInterrupt) as early:
                found.ended = OUT_OF_TIME if isinstance(early, OutOfTimeError) else INTERRUPTED
                if done:
                    _keep_rounds(found, done)
                return
            except FailedError as failed:
                found.ended = FAILED
                found.notes.append(f"the experiments ended early: {failed}")
                return
            took_s = time.monotonic() - turn
            missing = max(REPETITIONS[0] - _rounds(found), 0)
            if len(found.refused) > before and not found.rungs["everything"]:
                continue  # the round was discarded
            plan = self._next(plan, took_s, missing)
        if _rounds(found) < REPETITIONS[0]:
            found.ended = OUT_OF_TIME

    def _next(self, plan: Plan, took_s: float, missing: int) -> Plan | None:
        left_s = self.runner.deadline.left_s
        if self.asked.steps:
            return plan if took_s <= left_s else None
        return next_plan(plan, took_s, left_s, self._cost(), missing, self.workers)

    def _cost(self) -> RoundCost:
        phases = sum(one != LOADER for _, phases in self.runs for one in phases)
        return RoundCost(len(self.runs) * self.start_s, self.step_s, phases)

    def _has(self, kind: tuple[bool, str]) -> bool:
        return any(kind == (alone, one) for alone, phases in self.runs for one in phases)

    def _short_notes(self, found: Ladder) -> list[str]:
        """Return notes on rounds or steps that are fewer than they should be."""
        rounds = _rounds(found)
        minutes = f"--minutes {self.asked.minutes:g}"
        if found.ended == INTERRUPTED:
            return [f"interrupted: the figures are of {counted(rounds, 'round')}"]
        if found.ended == OUT_OF_TIME:
            round_s = self._cost().duration_s(LEAST_STEPS + self.asked.warming)
            needed = (REPETITIONS[0] * round_s + self.start_s) / MINUTE_S
            return [
                f"{minutes} was enough for {counted(rounds, 'round')} of experiments, and "
                f"{REPETITIONS[0]} are needed to tell what is noise. HINT: --minutes "
                f"{max(math.ceil(1.2 * needed), math.ceil(self.asked.minutes + 0.1))}"
            ]
        if self.asked.steps or found.notes or found.steps >= LEAST_STEPS:
            return []
        more = (LEAST_STEPS + self.asked.warming) / (found.steps + found.warm)
        return [
            f"steps are too long for {minutes}: each run measured only {found.steps}, and the "
            "figures are less precise. HINT: --minutes "
            f"{math.ceil(more * found.seconds / MINUTE_S)}"
        ]

    def _fitted(self, plan: Plan | None, ended: EndedError, found: Ladder) -> Plan:
        """Return a plan that fits into a script that ends early.

        If not even short phases fit into one run, each phase gets a run of its own.
        """
        assert plan is not None
        fits = fit_into_script(plan, ended.done, self._most_phases())
        if fits is None and self._most_phases() > 1:
            self.runs = [
                (alone, part) for alone, phases in self.runs for part in split_phases(phases)
            ]
            fits = fit_into_script(plan, ended.done, 1)
            if plan.warm + plan.steps <= ended.done:
                fits = plan
        if fits is None:
            raise ended
        found.notes = [
            f"the script ends after {counted(ended.done, 'step')}: each experiment measures only "
            f"{fits.steps}. HINT: let the script train longer for more precise figures"
        ]
        for rungs in found.rungs.values():
            rungs.clear()
        return fits

    def _most_phases(self) -> int:
        return max(sum(one != LOADER for one in phases) for _, phases in self.runs)

    def _run_round(self, found: Ladder, plan: Plan) -> None:
        """Run every rung once, with one rank and with all ranks.

        A rung that fails is left out from now on, and the results of this run are discarded.

        Raises:
            OutOfTimeError, InterruptedRunError: The round was ended early. Its results are kept
                if there is no other round.
        """
        count = _rounds(found)
        for alone, phases in self.runs:
            left = tuple(one for one in phases if _rung_name(alone, one) not in found.refused)
            if not left:
                continue
            rung = Rung(plan.warm, plan.steps, left)
            steps = len(left) * (plan.warm + plan.steps)
            limit_s = max(MIN_RUN_LIMIT_S, RUN_LIMIT_FACTOR * (self.start_s + steps * self.step_s))
            try:
                run = self.runner.run(alone, rung, limit_s=limit_s)
            except FailedError as failed:
                self._refuse(found, count, rung, alone, failed.steps, failed)
                return
            except (OutOfTimeError, InterruptedRunError) as early:
                if isinstance(early, OutOfTimeError) and self.runner.deadline.left_s:
                    slow = FailedError(f"it took longer than {limit_s:.0f} s", 0, "too slow")
                    done = steps_done(early.run) if early.run is not None else 0
                    self._refuse(found, count, rung, alone, done, slow)
                    return
                self._use_part(found, count, rung, alone, early.run)
                raise
            for phase in left:
                if phase != LOADER:
                    self._measure(found, run, rung, alone, phase)
            if not alone and EVERYTHING in left:
                found.run, found.warm, found.steps = run, plan.warm, plan.steps
            found.loader = (loader_totals(run) if not alone else None) or found.loader

    def _measure(self, found: Ladder, run: Run, rung: Rung, alone: bool, phase: str) -> None:
        taken = measure_rung(run, rung.first_measured_step(phase), rung.steps, phase)
        found.rungs[_rung_name(alone, phase)].append(taken)

    def _refuse(
        self, found: Ladder, count: int, rung: Rung, alone: bool, steps: int, failed: FailedError
    ) -> None:
        """Leave out the rung that failed, and those after it, and discard this round.

        If one rank alone fails, only its part of the round is discarded.
        """
        number = min(rung.phase_index(steps), len(rung.phases) - 1)
        _keep_rounds(found, count, alone)
        if _rung_name(alone, rung.phases[number]) == "everything":
            raise failed
        found.refused |= {_rung_name(alone, one): str(failed) for one in rung.phases[number:]}

    def _use_part(
        self, found: Ladder, count: int, rung: Rung, alone: bool, run: Run | None
    ) -> None:
        """Keep what an unfinished round has measured, if there is no complete round."""
        if count:
            return
        for phase in rung.phases if run is not None and not run.missing else ():
            assert run is not None
            try:
                self._measure(found, run, rung, alone, phase)
            except (EndedError, KeyError):  # the run was ended before this phase was over
                break
            if not alone and phase == EVERYTHING:
                found.run, found.warm, found.steps = run, rung.warm, rung.steps

    def _adapt_to_script(self, run: Run) -> None:
        """Adapt later runs to what the first run shows of the script.

        A single rank computes with as many threads as one of several ranks, and rungs that only
        some scripts need are added.
        """
        self.runner.as_in(run)
        told = [record.meta.get("rung", {}) for record in run.records]
        self.workers = max(one.get("workers", 0) for one in told)
        together: tuple[str, ...] = (EVERYTHING, CACHED, SILENT, LOADER)
        single: tuple[str, ...] = (EVERYTHING, CACHED)
        if any(one.get("threads", 1) > 1 for one in told):
            together = (EVERYTHING, CACHED, SILENT, ONE_THREAD, LOADER)
        if any(one.get("convolutions") and not one.get("channels_last") for one in told):
            single = (EVERYTHING, CACHED, CHANNELS_LAST)
        self.runs = [(False, together), (True, single)]


def _keep_rounds(found: Ladder, count: int, only_alone: bool = False) -> None:
    """Discard results of rounds after the first ``count``."""
    for name, rungs in found.rungs.items():
        if RUNGS[name][0] or not only_alone:
            del rungs[count:]


def _book_rare(found: Ladder, phases: int) -> None:
    """Compare rungs with the same share of validation and checkpoints in each."""
    seen = found.survey
    is_partial = seen is not None and (seen.missing_s > 0 or not seen.epoch_batches)
    if seen is not None and is_partial and seen.steps < phases * (found.warm + found.steps):
        found.survey = None  # the experiments have seen more
    names = [name for name, (alone, _) in RUNGS.items() if not alone and name in found.rungs]
    seen = found.survey or pooled([one for name in names for one in found.rungs[name]])
    if seen is not None:
        found.rungs |= {name: book_rare(found.rungs[name], seen) for name in names}


def _rounds(found: Ladder) -> int:
    return len(found.rungs["everything"])


def _rung_name(alone: bool, phase: str) -> str:
    """Return the name of the rung that runs a phase with one or with all ranks."""
    return next((name for name, rung in RUNGS.items() if rung == (alone, phase)), phase)
